"""Each of the ten invariants holds of a good run and fails of one that breaks it: a check that cannot fail checks nothing."""

import asyncio
import json
import socket
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from headway.events import Admitted, BatchFormed, Finished, GroupDropped, Published, Ready, RolloutDropped, SourceExhausted
from headway.testing import assert_run
from headway.testing.check import INVARIANTS

pytestmark = pytest.mark.e2e


def test_a_good_run_breaks_none(scene):
    assert scene.violations() == []


def test_every_invariant_has_a_definition():
    assert sorted(INVARIANTS) == list(range(1, 11))
    assert all(len(invariant.__doc__.splitlines()) > 3 for invariant in INVARIANTS.values())


def test_assert_run_names_the_run_and_every_violation(scene):
    scene.set_info(ended={"code": 0, "cause": "", "time": 1.0})
    (scene.run.path / "odd.jsonl").write_text("NaN\n")
    with pytest.raises(AssertionError, match=r"(?s)2 violations.*invariant 8: run.json names no cause.*invariant 10: .*NaN"):
        assert_run(scene.directory, exit_code=0)


# ------------------------------------------------------------------------------------------------------------------------ 1 accounting


def of(kind, events):
    return next(event for event in events if isinstance(event, kind))


def test_1_a_group_that_vanishes(scene):
    events = scene.events
    last = next(event for event in reversed(events) if isinstance(event, Admitted))
    scene.set_events([*events, msgspec.structs.replace(last, group=last.group + 1)])
    assert scene.broken() >= {1}


def test_1_a_member_that_vanishes(scene):
    events = scene.events
    formed = of(BatchFormed, events)
    gone = next(event for event in events if isinstance(event, Finished) and event.group == formed.groups[0])
    scene.set_events([event for event in events if event is not gone])
    assert 1 in scene.broken()


def test_1_a_group_in_two_batches(scene):
    events = scene.events
    first, second = [event for event in events if isinstance(event, BatchFormed)][:2]
    twice = msgspec.structs.replace(second, groups=(*second.groups, first.groups[0]))
    scene.set_events([twice if event is second else event for event in events])
    assert 1 in scene.broken()


def test_1_a_trained_group_that_is_dropped(scene):
    events = scene.events
    formed = of(BatchFormed, events)
    scene.set_events([*events, GroupDropped(events[-1].time, formed.groups[0], "stale", "", 0)])
    assert 1 in scene.broken()


def test_1_a_rollout_that_the_batch_lost(scene):
    scene.set_rows(1, scene.rows(1)[:-1])
    assert 1 in scene.broken()


def test_1_a_batch_that_the_journal_does_not_know(scene):
    scene.set_events([event for event in scene.events if not (isinstance(event, BatchFormed) and event.k == 4)])
    assert 1 in scene.broken()


def test_1_metrics_that_count_otherwise(scene):
    rows = scene.metrics()
    rows[2]["rollouts"] += 1
    scene.set_metrics(rows)
    assert scene.broken() == {1}


def test_1_an_attempt_that_nobody_recorded(scene):
    played = next(entry for entry in scene.environment if entry["what"] == "close" and entry["purpose"] == "train")
    for what in ("reset", "close"):
        scene.environment.append({**played, "what": what, "attempt": 7})
    assert scene.broken() == {1}


def test_1_a_finish_without_an_attempt(scene):
    finished = of(Finished, scene.events)
    name = finished.group, finished.member, finished.attempt
    scene.environment = [
        e for e in scene.environment if (e.get("group"), e.get("member"), e.get("attempt")) != name or e["purpose"] != "train"
    ]
    assert scene.broken() == {1}


# ----------------------------------------------------------------------------------------------------------------------------- 2 bound


def test_2_a_token_too_old(scene):
    arrays = scene.arrays(4)
    arrays["versions"][np.flatnonzero(arrays["loss_mask"])[0]] = 0
    scene.set_arrays(4, **arrays)
    scene.set_facts(4, min_contributing_version=0)
    assert 2 in scene.broken()


def test_2_a_token_of_the_future(scene):
    arrays = scene.arrays(1)
    arrays["versions"][np.flatnonzero(arrays["loss_mask"])[0]] = 2
    scene.set_arrays(1, **arrays)
    assert 2 in scene.broken()


def test_2_a_batch_with_more_room_than_the_config_gives(scene):
    scene.set_facts(1, max_staleness=7)
    assert scene.broken() == {2}


def test_2_a_manifest_that_hides_the_oldest_token(scene):
    scene.set_facts(4, min_contributing_version=5)
    assert scene.broken() == {2}


def test_2_stamps_too_old_for_tokens_that_train(scene):
    rows = scene.rows(4)
    sample = next(row for row in rows if row["trained"])["samples"][0]
    sample["span_start"], sample["span_version"] = [0], [0]
    scene.set_rows(4, rows)
    assert 2 in scene.broken()


def test_2_a_stamp_newer_than_the_weights_that_wrote_it(scene):
    for log in scene.engines:
        for entry in log:
            if entry["what"] == "finished":
                entry["loaded"] = [[0, start, end] for _, start, end in entry["loaded"]]
    assert scene.broken() == {2}


# -------------------------------------------------------------------------------------------------------------------------- 3 fidelity


def test_3_an_id_that_the_engine_did_not_write(scene):
    finished = [entry for log in scene.engines for entry in log if entry["what"] == "finished" and entry["ids"]]
    for entry in finished:
        entry["ids"] = [entry["ids"][0] + 1, *entry["ids"][1:]]
    assert scene.broken() == {3}


def test_3_a_logprob_that_the_engine_did_not_give(scene):
    for log in scene.engines:
        for entry in log:
            if entry["what"] == "finished" and entry["logprobs"]:
                entry["logprobs"][-1] -= 0.5
    assert scene.broken() == {3}


def test_3_a_stamp_that_the_engine_did_not_say(scene):
    for log in scene.engines:
        for entry in log:
            if entry["what"] == "finished":
                entry["labels"] = [["run-99", start, end] for _, start, end in entry["labels"]]
    assert scene.broken() == {3}


def test_3_a_turn_that_was_not_sent_what_stood_before_it(scene):
    for log in scene.engines:
        for entry in log:
            if entry["what"] == "arrived" and entry["turn"] == 2:
                entry["prompt"][-1] += 1
    assert scene.broken() == {3}


@pytest.mark.parametrize("name", ["loss_mask", "logprobs", "sampled_mask"])
def test_3_lists_of_a_sample_with_unequal_lengths(scene, name):
    rows = scene.rows(2)
    rows[0]["samples"][0][name].append(rows[0]["samples"][0][name][-1])
    scene.set_rows(2, rows)
    assert 3 in scene.broken()


def test_3_an_observed_token_in_the_loss(scene):
    rows = scene.rows(2)
    rows[0]["samples"][0]["loss_mask"][0] = True
    scene.set_rows(2, rows)
    assert 3 in scene.broken()


def test_3_arrays_that_are_not_the_record(scene):
    arrays = scene.arrays(3)
    arrays["token_ids"][0] += 1
    scene.set_arrays(3, **arrays)
    assert scene.broken() == {3}


def test_3_an_advantage_that_changes_within_a_sample(scene):
    arrays = scene.arrays(3)
    arrays["advantages"][0] += 1
    scene.set_arrays(3, **arrays)
    assert scene.broken() == {3}


# --------------------------------------------------------------------------------------------------------------------- 4 sane batches


def test_4_a_batch_that_is_all_masked(scene):
    scene.set_arrays(2, loss_mask=np.zeros_like(scene.arrays(2)["loss_mask"]))
    assert 4 in scene.broken()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_4_an_advantage_that_is_not_finite(scene, value):
    arrays = scene.arrays(2)
    start, end = arrays["sample_offsets"][:2]
    arrays["advantages"][start:end] = value
    scene.set_arrays(2, **arrays)
    assert 4 in scene.broken()


def test_4_a_reward_that_is_not_finite(scene):
    rows = scene.rows(2)
    rows[0]["reward"] = float("nan")
    scene.set_rows(2, rows)
    assert scene.broken() == {4}


def test_4_a_trainer_that_was_given_nothing(scene):
    next(entry for entry in scene.trainer if entry["what"] == "consumed")["contributing"] = 0
    assert scene.broken() == {4}


# --------------------------------------------------------------------------------------------------------------------- 5 trained once


def test_5_a_prompt_trained_twice_in_an_epoch(scene):
    events = scene.events
    first, second = [event for event in events if isinstance(event, BatchFormed)][:2]
    admitted = {event.group: event for event in events if isinstance(event, Admitted)}
    one, other = admitted[first.groups[0]], admitted[second.groups[0]]
    again = msgspec.structs.replace(other, prompt_id=one.prompt_id, epoch=one.epoch)
    scene.set_events([again if event is other else event for event in events])
    assert scene.broken() == {5}


def test_5_a_batch_consumed_twice(scene):
    at = next(i for i, entry in enumerate(scene.trainer) if entry["what"] == "consumed" and entry["k"] == 2)
    scene.trainer.insert(at, scene.trainer[at])
    assert scene.broken() == {5}


def test_5_a_version_published_twice(scene):
    at = next(i for i, entry in enumerate(scene.trainer) if entry["what"] == "published" and entry["version"] == 2)
    scene.trainer.insert(at, scene.trainer[at])
    assert scene.broken() == {5}


def test_5_a_batch_that_came_again_with_other_bytes(scene):
    at = next(i for i, entry in enumerate(scene.trainer) if entry["what"] == "consumed" and entry["k"] == 2)
    entry = scene.trainer[at]
    restart = {**scene.trainer[0], "version": 2, "time": entry["time"]}
    scene.trainer[at : at + 1] = [{**entry, "sha": "other"}, restart, entry]
    assert scene.broken() == {5}


def test_5_a_restart_that_trains_the_same_batch_is_no_second_training(scene):
    at = next(i for i, entry in enumerate(scene.trainer) if entry["what"] == "consumed" and entry["k"] == 2)
    entry = scene.trainer[at]
    scene.trainer[at : at + 1] = [entry, {**scene.trainer[0], "version": 2, "time": entry["time"]}, entry]
    assert scene.broken() == set()


def test_5_a_batch_that_is_skipped(scene):
    scene.trainer = [entry for entry in scene.trainer if not (entry["what"] == "consumed" and entry["k"] == 2)]
    assert scene.broken() == {5}


def test_5_a_trainer_that_saw_other_groups_than_the_journal(scene):
    next(entry for entry in scene.trainer if entry["what"] == "consumed" and entry["k"] == 2)["groups"].pop()
    assert scene.broken() == {5}


def test_5_a_prompt_to_be_tried_again_that_never_was(scene):
    events = scene.events
    formed = {group for event in events if isinstance(event, BatchFormed) for group in event.groups}
    ready = next((event for event in events if isinstance(event, Ready) and event.group not in formed), None)
    if ready is None:  # the run used every group: one more is admitted and lost
        last = max(event.group for event in events if isinstance(event, Admitted))
        events.append(Admitted(events[-1].time, last + 1, "p9999", 0, 4, 5))
        lost = last + 1
    else:
        lost = ready.group
    dropped = GroupDropped(events[-1].time, lost, "stale", "", 0, requeued=True)
    scene.set_events([*events, dropped, SourceExhausted(events[-1].time)])
    assert scene.broken() == {5}


# ---------------------------------------------------------------------------------------------------------------------- 6 concurrency


def test_6_a_pipeline_row_over_the_limit(scene):
    rows = [json.loads(line) for line in scene.run.pipeline_jsonl.read_text().splitlines()]
    rows[0]["rollouts_in_flight"], rows[0]["eval_in_flight"] = 20, 5
    scene.run.pipeline_jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert scene.broken() == {6}


def test_6_more_attempts_at_once_than_allowed(scene):
    first = next(entry for entry in scene.environment if entry["what"] == "reset")
    for member in range(25):
        for what, seconds in (("reset", 0.0), ("close", 0.2)):
            scene.environment.append(
                {**first, "purpose": "eval", "what": what, "member": 100 + member, "time": first["time"] - 5 + seconds}
            )
    scene.environment.sort(key=lambda entry: entry["time"])
    assert scene.broken() == {6}


def test_6_an_attempt_is_over_when_the_journal_has_its_end_though_its_process_stood_still_and_noticed_later(scene):
    first = next(entry for entry in scene.environment if entry["what"] == "reset" and entry["purpose"] == "train")
    began, events = first["time"] - 20, scene.events
    late = [{**first, "attempt": 7, "member": member, "time": began + 0.2 * member} for member in range(25)]
    scene.environment[:0] = [*late, *({**entry, "what": "close", "time": began + 10} for entry in late)]
    assert 6 in scene.broken()
    told = [RolloutDropped(entry["time"] + 0.1, entry["group"], entry["member"], 7, "timeout", "", 0, False) for entry in late]
    scene.set_events([*events, *told])
    assert 6 not in scene.broken()


def test_6_more_requests_at_once_than_allowed(scene):
    arrived = next(entry for entry in scene.engines[0] if entry["what"] == "arrived")
    finished = next(entry for entry in scene.engines[0] if entry["what"] == "finished" and entry["id"] == arrived["id"])
    for number in range(25):
        name = {"id": 10**6 + number, "purpose": "eval"}
        scene.engines[0] += [{**arrived, **name, "time": 1.0}, {**finished, **name, "time": 2.0}]
    assert scene.broken() == {6}


# ------------------------------------------------------------------------------------------------------------------------- 7 unpaused


@pytest.mark.parametrize("engine", [0, 1])
def test_7_an_engine_that_was_left_paused(scene, engine):
    log = scene.engines[engine]
    for entry in reversed(log):
        if entry["what"] == "answered" and entry["path"] == "/resume":
            break
    resumed = log.index(entry)
    scene.engines[engine] = [e for e in log[:resumed] if e.get("id") != entry["id"]]
    for later in reversed(scene.engines[engine]):
        if later["what"] == "answered":
            later["paused"] = True
            break
    assert 7 in scene.broken()


def test_7_an_engine_that_was_killed_while_paused_is_nobodys_to_resume(scene):
    scene.engines[1] += [{**scene.engines[1][-1], "what": "answered", "path": "/pause", "status": 200, "paused": True, "id": 10**6}]
    assert scene.broken() == {7}
    scene.engines[1] += [{"what": "killed", "time": 0.0, "pid": 1}]
    assert scene.broken() == set()


# --------------------------------------------------------------------------------------------------------------------------- 8 endings


def test_8_an_exit_code_that_run_json_does_not_know(scene):
    scene.exit_code = 1
    assert 8 in scene.broken()


def test_8_an_exit_code_that_means_nothing(scene):
    scene.exit_code = 7
    assert 8 in scene.broken()


def test_8_an_end_without_a_cause(scene):
    scene.set_info(ended={"code": 0, "cause": " ", "time": 1.0})
    assert scene.broken() == {8}


def test_8_an_end_that_nobody_recorded(scene):
    scene.set_info(ended=None)
    assert 8 in scene.broken()


def test_8_a_killed_process_records_no_end_and_breaks_nothing(scene):
    scene.set_info(ended=None)
    scene.exit_code = -9
    assert scene.broken() == set()


def test_8_success_without_a_trained_batch(scene):
    kinds = (Admitted, Finished, RolloutDropped, Ready)
    first = of(BatchFormed, scene.events).groups[0]
    scene.set_events([event for event in scene.events if isinstance(event, kinds) and event.group == first])
    assert 8 in scene.broken()


def test_8_a_silence_that_nobody_reported(scene):
    limit = 1800
    events = scene.events
    later = msgspec.structs.replace(events[-1], time=events[-1].time + 2 * limit)
    scene.set_events([*events[:-1], later])
    assert scene.broken() == {8}
    scene.run.events_log.write_text(scene.run.events_log.read_text() + "WARNING stalled: trainer\n")
    assert scene.broken() == set()


# ------------------------------------------------------------------------------------------------------------------------- 9 remainders


def test_9_a_process_that_is_still_there(scene, monkeypatch):
    monkeypatch.setattr("headway.testing.check.remains.GONE_SECONDS", 0.0)
    with (scene.run.path / "logs" / "left.log").open("w") as log:
        left = subprocess.Popen([sys.executable, "-c", "input()"], stdout=log, stdin=subprocess.PIPE)
    try:
        [violation] = scene.violations()
    finally:
        left.kill()
        left.communicate()
    assert (violation.invariant, f"process {left.pid}" in violation.what) == (9, True)
    assert scene.violations() == []


def test_9_a_lock_that_is_still_held(scene):
    code = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code, str(scene.run.lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    scene.engines[0].append({"what": "served", "pid": holder.pid, "time": 0.0})  # taken for a fake: the lock alone shall tell
    try:
        assert [violation.what for violation in scene.violations()] == [f"{scene.run.lock} is still held"]
    finally:
        holder.kill()
        holder.communicate()


def test_9_a_port_that_is_still_taken(scene):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with scene.run.events_log.open("a") as log:
            log.write(f"2026 INFO engine-0 is ready: {{'url': '{url}'}}\n")
        assert scene.broken() == {9}
    assert scene.broken() == set()


def test_9_staging_litter_after_an_end_in_order_and_after_a_kill(scene):
    (scene.run.batches / ".tmp-00000009-abc").mkdir()
    assert scene.broken() == {9}
    scene.exit_code = -9
    assert scene.broken() == set()


def test_9_a_batch_that_is_not_whole(scene):
    path = scene.run.batch(3) / "batch.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert 9 in scene.broken()


def test_9_a_batch_without_a_manifest(scene):
    (scene.run.batch(3) / "manifest.json").unlink()
    assert 9 in scene.broken()


def test_9_a_version_that_is_not_whole(scene):
    with (scene.run.weight(3) / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert scene.broken() == {9}


def test_9_a_version_that_was_published_without_a_manifest(scene):
    assert any(isinstance(event, Published) and event.version == 3 for event in scene.events)
    (scene.run.weight(3) / "manifest.json").unlink()
    assert scene.broken() == {9}


def test_9_an_unmarked_directory_that_nobody_used_is_none_of_the_run(scene):
    (scene.run.weights / "00000099").mkdir()
    assert scene.broken() == set()


def test_9_an_engine_that_was_given_half_a_version(scene):
    scene.engines[0].append({"what": "loaded", "version": 3, "directory": str(scene.run.weight(3)), "whole": False, "pid": 1, "time": 0.0})
    assert scene.broken() == {9}


def test_9_an_address_that_is_still_told(scene):
    scene.run.ingest_json.write_text("{}")
    assert scene.broken() == {9}


# ------------------------------------------------------------------------------------------------------------------------ 10 strict json


@pytest.mark.parametrize("line", ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1', "", '{"a": 1, "a": 2}', "\udcff"])
def test_10_a_line_that_is_no_strict_json(scene, line):
    with scene.run.pipeline_jsonl.open("ab") as file:
        file.write(line.encode("utf-8", "surrogateescape") + b"\n")
    assert scene.broken() == {10}


def test_10_half_a_line_at_the_end_is_the_mark_of_a_kill_only(scene):
    with scene.run.pipeline_jsonl.open("ab") as file:
        file.write(b'{"a": ')
    assert scene.broken() == {10}
    scene.exit_code = -9
    assert scene.broken() == set()


def test_10_separators_of_lines_inside_a_text_are_no_ends_of_lines(scene):
    with scene.run.pipeline_jsonl.open("ab") as file:
        file.write(json.dumps({"text": "a\u2028b\u0085c\x0bd"}, ensure_ascii=False).encode() + b"\n")
    assert scene.broken() == set()


def test_10_a_trainers_metrics_that_are_no_json(scene):
    scene.run.trainer_metric(2).write_text('{"loss": NaN}')
    assert scene.broken() == {10}


# ---------------------------------------------------------------------------------------------------------------------- what is unreadable


def test_a_damaged_journal_is_a_violation_and_no_pass(scene):
    database = scene.run.state / "events.sqlite"
    data = bytearray(database.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 4096] = b"\xff" * 4096
    database.write_bytes(data)
    assert 1 in scene.broken()


def test_a_missing_journal_is_a_violation_and_no_pass(scene):
    (scene.run.state / "events.sqlite").unlink()
    assert 1 in scene.broken()


def test_a_missing_run_json_is_a_violation_and_no_pass(scene):
    scene.run.run_json.unlink()
    assert 8 in scene.broken()


def test_it_may_be_called_from_within_a_loop(scene):
    async def check():
        return scene.violations()

    assert asyncio.run(check()) == []
