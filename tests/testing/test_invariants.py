"""Each of the ten invariants holds of a good run and fails of one that breaks it: a check that cannot fail checks nothing.

Here: 1, 4 and 5, of groups and batches.
"""

import asyncio

import msgspec
import numpy as np
import pytest
from broken_runs import first_of

from headway.events import Admitted, BatchFormed, Finished, GroupDropped, SourceExhausted
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


def test_1_a_group_that_vanishes(scene):
    events = scene.events
    last = next(event for event in reversed(events) if isinstance(event, Admitted))
    scene.set_events([*events, msgspec.structs.replace(last, group=last.group + 1)])
    assert scene.broken() >= {1}


def test_1_a_member_that_vanishes(scene):
    events = scene.events
    formed = first_of(BatchFormed, events)
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
    formed = first_of(BatchFormed, events)
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
    kept = first_of(BatchFormed, scene.events).groups  # attempts of a group that was dropped need no end
    played = next(e for e in scene.environment if e["what"] == "close" and e["purpose"] == "train" and e["group"] in kept)
    for what in ("reset", "close"):
        scene.environment.append({**played, "what": what, "attempt": 7})
    assert scene.broken() == {1}


def test_1_a_finish_without_an_attempt(scene):
    finished = first_of(Finished, scene.events)
    name = finished.group, finished.member, finished.attempt
    scene.environment = [
        e for e in scene.environment if (e.get("group"), e.get("member"), e.get("attempt")) != name or e["purpose"] != "train"
    ]
    assert scene.broken() == {1}


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
    time, lost = events[-1].time, max(event.group for event in events if isinstance(event, Admitted)) + 1
    one_more = Admitted(time, lost, "p9999", 0, 4, 5), GroupDropped(time, lost, "stale", "", 0, requeued=True)
    scene.set_events([*events, *one_more, SourceExhausted(time)])
    assert scene.broken() == {5}


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
