"""The trainer as a process: ready when it is, gone with its parent, killed without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest
from trainer_runs import LINEAGE, config, write_batch

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402

from headway.embedded.trainer.loop import Trainer  # noqa: E402
from headway.errors import StorageError  # noqa: E402
from headway.formats.hold import alone  # noqa: E402
from headway.formats.run_directory import RunDirectory, RunInfo, load_run_info, numbered, save_run_info  # noqa: E402
from headway.formats.shared_memory import is_available, memory_of  # noqa: E402
from headway.lifeline import VARIABLE  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.e2e]

PROGRAM = "import sys, pathlib; from headway.embedded.trainer import serve; serve(pathlib.Path(sys.argv[1]))"
BUSY_AT_SIGUSR1 = "import signal, threading; signal.signal(signal.SIGUSR1, lambda *_: threading.Event().wait()); "
CONFIG = """
run = {steps = 3, seed = 7}
prompts = {source = "prompts.jsonl"}
environment = {entry = "guess:attempt"}
model.init = {hidden_size = 16, num_attention_heads = 2, num_key_value_heads = 1, head_dim = 8, intermediate_size = 32}
trainer = {device = "cpu", threads = 1, learning_rate = 1e-2, minibatches = 2}
"""


def prepared(path, *, run_id="r", more=""):
    run = RunDirectory.create(path)
    run.config.write_text(CONFIG + more)
    info = {
        "id": run_id,
        "lineage": LINEAGE,
        "headway_version": "0",
        "engine_version": "",
        "trainer_version": "",
        "seed": 7,
        "created": 0.0,
    }
    save_run_info(run, RunInfo(**info))
    return run


@contextmanager
def trainer_process(run, program=PROGRAM):
    """Start a trainer; yields the process and the parent's end of its lifeline."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", program, str(run.path)],
                env=os.environ | {VARIABLE: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
            )
        try:
            ours.settimeout(180)
            yield process, ours
        finally:
            process.kill()
            process.wait()


def ready(end):
    with end.makefile("rb") as lines:
        return json.loads(lines.readline())


def until(condition, *, seconds=180):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def test_a_killed_trainer_started_again_trains_on_as_if_it_had_not_died(tmp_path):
    straight, killed = RunDirectory.create(tmp_path / "straight"), prepared(tmp_path / "killed")
    for k in range(3):
        write_batch(straight, k)
    Trainer(straight, config(steps=3), lineage=LINEAGE).run(threading.Event())
    with trainer_process(killed) as (process, end):
        assert ready(end) == {"version": 0}
        write_batch(killed, 0)
        until(lambda: numbered(killed.weights) == [0, 1])
        process.send_signal(signal.SIGKILL)
        process.wait()
    write_batch(killed, 1)
    with trainer_process(killed) as (process, end):
        assert ready(end) == {"version": 1}
        until(lambda: numbered(killed.weights) == [0, 1, 2])
        end.close()  # the parent is gone
        assert process.wait(120) in {0, 70}  # 70: it was too slow to leave by itself within the time that it has
    write_batch(killed, 2)
    Trainer(killed, config(steps=3), lineage=LINEAGE).run(threading.Event())
    expected, found = (load_file(run.weight(3) / "model.safetensors") for run in (straight, killed))
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


@pytest.mark.skipif(not is_available(), reason="no /dev/shm here")
def test_a_trainer_that_is_too_busy_to_end_with_its_parent_leaves_nothing_in_memory(tmp_path):
    run = prepared(tmp_path / "run", run_id=uuid.uuid4().hex, more='engine.weight_transfer = "memory"\n')
    memory = memory_of(load_run_info(run).id)
    with trainer_process(run, BUSY_AT_SIGUSR1 + PROGRAM) as (process, end):
        ready(end)
        write_batch(run, 0)
        until(lambda: numbered(run.weights) == [0, 1])
        assert numbered(memory)
        process.send_signal(signal.SIGUSR1)
        end.close()
        assert process.wait(120) == 70  # ended by its watch over the parent
    assert not memory.exists()


def has_open(pid, path):
    """Whether a process has a file open; its descriptors may come and go while we look."""
    with contextlib.suppress(FileNotFoundError):
        return any(link.resolve() == path for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_a_trainer_waits_for_one_that_has_outlived_its_orchestrator(tmp_path):
    run = prepared(tmp_path / "run")
    with alone(run.trainer_lock) as _, trainer_process(run) as (process, end):
        until(lambda: has_open(process.pid, run.trainer_lock))
        process.send_signal(signal.SIGTERM)  # while it waits
        assert process.wait(120) == 0
        assert end.recv(1) == b""
        assert numbered(run.weights) == []
    with trainer_process(run) as (process, end):
        assert ready(end) == {"version": 0}
        with pytest.raises(StorageError, match="another process holds it"), alone(run.trainer_lock, seconds=0):
            pass


def test_a_trainer_ends_on_sigterm_and_leaves_ctrl_c_to_its_parent(tmp_path):
    run = prepared(tmp_path / "run")
    with trainer_process(run) as (process, end):
        ready(end)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert numbered(run.weights) == [0]
    assert not list(run.weights.glob(".tmp-*"))
