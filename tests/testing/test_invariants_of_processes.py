"""The invariants of processes and what they leave behind, 6 to 10, fail of a run that breaks them."""

import contextlib
import json
import socket
import subprocess
import sys

import msgspec
import pytest
from broken_runs import first_of

from headway.events import Admitted, BatchFormed, Finished, Published, Ready, RolloutDropped

pytestmark = pytest.mark.e2e


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
    log = scene.engines[0]
    finished = next(entry for entry in log if entry["what"] == "finished" and not entry["disconnected"])  # a killed worker left others
    arrived = next(entry for entry in log if entry["what"] == "arrived" and entry["id"] == finished["id"])
    for number in range(25):
        name = {"id": 10**6 + number, "purpose": "eval"}
        log += [{**arrived, **name, "time": 1.0}, {**finished, **name, "time": 2.0}]
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
    first = first_of(BatchFormed, scene.events).groups[0]
    scene.set_events([event for event in scene.events if isinstance(event, kinds) and event.group == first])
    assert 8 in scene.broken()


def test_8_a_silence_that_nobody_reported(scene):
    limit = 1800
    events = scene.events
    later = msgspec.structs.replace(events[-1], time=events[-1].time + 2 * limit)
    scene.set_events([*events[:-1], later])
    assert scene.broken() == {8}
    before = scene.run.events_log.read_text()
    scene.run.events_log.write_text(before + "WARNING install what the checkpoint needs\n")
    assert scene.broken() == {8}
    scene.run.events_log.write_text(before + "WARNING nothing has moved for 1800 s; stalled: trainer: it is silent\n")
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


LISTENER = """
import socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
listener.listen()
print("listens", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def listening(listener, directory):
    """Have another process, which is in `directory`, listen at a port that is bound."""
    command = [sys.executable, "-c", LISTENER, str(listener.fileno())]
    held, pipe = [listener.fileno()], subprocess.PIPE
    with subprocess.Popen(command, cwd=directory, pass_fds=held, stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == b"listens\n"
        yield
        process.communicate()


def test_9_a_port_that_is_still_taken_by_somebody_of_the_run(scene, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with scene.run.events_log.open("a") as log:
            log.write(f"2026 INFO engine-0 is ready: {{'url': '{url}'}}\n")
        assert scene.broken() == set()
        (tmp_path / "elsewhere").mkdir()
        with listening(listener, tmp_path / "elsewhere"):
            assert scene.broken() == set()  # a port that was let go is given to others
        with listening(listener, scene.run.path):
            assert scene.broken() == {9}


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
    version = max(event.version for event in scene.events if isinstance(event, Published))  # not all are: one may overtake another
    assert version > 0
    (scene.run.weight(version) / "manifest.json").unlink()
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
