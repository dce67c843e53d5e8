"""Ends of real runs: sandboxes closed, what hangs killed by name, rows on disk, children gone and ports free, stalls with exit code 3."""

import re
import signal
import socket
import time

import pytest
from held_ports import held_ports
from real_runs import Bench, Run, audit, interrupt, until

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

LONG = ["run.steps=100000", "environment.entry=world:slow"]

SANDBOXES = """
import pathlib, uuid

LOG = pathlib.Path(__file__).with_name("sandboxes")

def told(what, name):
    with LOG.open("a") as file:
        file.write(f"{what} {name}\\n")

async def sandboxed(prompt, policy, seconds=1.0):
    name = uuid.uuid4().hex
    told("open", name)
    try:
        await play(policy)
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(seconds)  # the sandbox's own
        told("closed", name)

async def closed_together(prompt, policy):
    name = uuid.uuid4().hex
    told("open", name)
    try:
        await play(policy)
        await asyncio.sleep(600)
    finally:
        told("closing", name)
        while LOG.read_text().count("closing ") < 24:
            await asyncio.sleep(0.05)
        told("closed", name)

async def never_closes(prompt, policy):
    told("open", uuid.uuid4().hex)
    try:
        await asyncio.sleep(600)
    finally:
        while True:
            time.sleep(1)
"""


def sandboxes(bench: Bench) -> dict[str, list[str]]:
    """Names of the sandboxes that were opened and closed, in order; the last line may be being written."""
    log = bench.directory / "sandboxes"
    told: dict[str, list[str]] = {"open": [], "closing": [], "closed": []}
    for line in log.read_text().split("\n")[:-1] if log.exists() else []:
        what, name = line.split()
        told[what].append(name)
    return told


def until_they_are_open(bench: Bench, count: int) -> None:
    until(lambda: len(sandboxes(bench)["open"]) >= count, what="sandboxes open")


# ------------------------------------------------------------------------------------------------------------------------- environments


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_H07_a_signal_closes_every_sandbox_once(bench: Bench, number: signal.Signals):
    bench.world(SANDBOXES)
    run = bench.start("environment.entry=world:sandboxed", "run.drain_timeout_seconds=2", "environment.cleanup_seconds=20")
    until_they_are_open(bench, 20)
    interrupt(run, number)
    ended = run.end()
    told = sandboxes(bench)
    assert ended.code == 128 + number
    assert sorted(told["closed"]) == sorted(told["open"])


def test_H07_kill_9_of_the_orchestrator_leaves_nothing_after_ten_seconds_whatever_the_clean_up_budget(bench: Bench):
    bench.world(SANDBOXES)
    run = bench.start("environment.entry=world:sandboxed", "environment.cleanup_seconds=600")
    until_they_are_open(bench, 20)
    run.process.kill()
    run.until_gone()
    told = sandboxes(bench)
    assert sorted(told["closed"]) == sorted(told["open"])


def test_H08_workers_close_in_parallel_and_none_that_is_within_its_budget_is_killed(bench: Bench):
    """Each sandbox waits for all others to be closing, those of the other workers too: one after the other they would never close."""
    bench.world(SANDBOXES)
    settings = ["environment.workers=3", "environment.entry=world:closed_together", "environment.cleanup_seconds=100"]
    run = bench.start(*settings, "rollout.timeout_seconds=0", "run.drain_timeout_seconds=1")
    until_they_are_open(bench, 24)
    interrupt(run)
    ended = run.end()
    told = sandboxes(bench)
    assert len(told["open"]) == 24
    assert sorted(told["closed"]) == sorted(told["open"])
    assert "killed" not in (run.directory / "events.log").read_text()
    assert ended.code == 130


def test_H08_L02_a_worker_that_never_closes_is_killed_at_the_limit_with_a_warning(bench: Bench):
    bench.world(SANDBOXES)
    settings = ["environment.entry=world:never_closes", "environment.cleanup_seconds=1", "run.drain_timeout_seconds=1"]
    run = bench.start(*settings)
    until_they_are_open(bench, 24)  # in flight is not enough: a call that has not begun is cancelled, and has nothing to close
    interrupt(run)
    ended = run.end()
    assert ended.code == ended.recorded["code"] == 130
    log = (run.directory / "events.log").read_text()
    assert re.search(r"\bworker-0\b.* is killed", log)


# ------------------------------------------------------------------------------------------------------------------------------ children


ELSEWHERE = """
async def elsewhere(prompt, policy):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    return Outcome(await play(policy))
async def elsewhere_and_stuck(prompt, policy):
    subprocess.Popen(["sh", "-c", "setsid sleep 600 & sleep 600"])
    await asyncio.sleep(600)
"""


def test_L05_what_user_code_has_started_in_a_session_of_its_own_is_gone_with_the_run(bench: Bench):
    bench.world(ELSEWHERE)
    ended = bench.play("run.steps=1", "environment.entry=world:elsewhere")
    assert ended.code == 0
    run = bench.start("environment.entry=world:elsewhere_and_stuck", "environment.cleanup_seconds=1", name="killed")
    until(lambda: len(run.marked("sleep 600")) > 20)
    run.process.kill()
    run.until_gone()


@pytest.mark.parametrize("times", [1, 2])
def test_L04_the_whole_tree_is_gone_and_the_port_is_free(bench: Bench, times: int):
    with held_ports() as port:
        run = bench.start(*LONG, f"engine.port={port}", attached=False)
        run.until_batch(0)
        interrupt(run, signal.SIGTERM)
        if times == 2:
            assert run.process.stderr is not None
            until(lambda: "once more stops now" in run.process.stderr.readline())
            interrupt(run, signal.SIGTERM)
        ended = run.end()
        assert ended.code == ended.recorded["code"] == 143
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the engine does; connections of the run may linger
            again.bind(("127.0.0.1", port))


STOPPER = """
import contextlib, signal

import psutil

def held_out():
    return [{"id": "held-out"}]

async def last(prompt, policy):
    reward = await play(policy)
    if prompt.id == "held-out":  # the last evaluation has sampled its tokens, and nobody needs the engine any more
        for child in psutil.Process(os.getppid()).children():
            with contextlib.suppress(psutil.Error):  # the trainer may have ended
                if "engine" in child.cmdline():
                    child.send_signal(signal.SIGSTOP)
    return Outcome(reward)
"""


def test_L02_children_that_do_not_listen_are_killed_and_named_and_the_run_ends_as_it_did(bench: Bench):
    bench.world(STOPPER)
    evaluation = ["environment.entry=world:last", "eval.prompts=world:held_out", "eval.every=2", "eval.n=1"]
    run = bench.start("run.steps=2", "run.shutdown_seconds=6", *evaluation, attached=False)
    ended = run.end()
    assert ended.code == ended.recorded["code"] == 0
    assert "not closed within run.shutdown_seconds (6 s), and left or killed: " in ended.err
    assert "engine-0" in ended.err


# ----------------------------------------------------------------------------------------------------------------------- rows and stalls


def last_batch_on_disk(run: Run) -> int:
    """The number of the newest batch."""
    return max(int(path.name) for path in (run.directory / "batches").iterdir() if path.name.isdigit())


def stop_the_trainer(run: Run) -> None:
    """Stop it, and wait until all batches are written that are formed without it: nobody is ended amid a write."""
    assert run._trainer is not None
    run._trainer.send_signal(signal.SIGSTOP)

    def rests() -> bool:
        rows = run.rows("pipeline.jsonl")[-3:]
        return len(rows) == 3 and all(last_batch_on_disk(run) + 1 == row["batches_formed"] == row["batch"] + 2 for row in rows)

    until(rests, what="all batches are written that may be formed")


def test_K08_the_last_shipped_batch_has_its_row_after_completion_sigterm_and_abort(bench: Bench):
    done = bench.play(name="done")
    assert done.code == 0
    assert [row["batch"] for row in done.rows("metrics.jsonl")] == [0, 1, 2]

    run = bench.start(*LONG, name="drained")
    run.until_batch(1)
    interrupt(run, signal.SIGTERM)
    drained = run.end()
    assert drained.code == 143
    assert drained.rows("metrics.jsonl")[-1]["batch"] == last_batch_on_disk(run)

    run = bench.start(*LONG, name="aborted")
    run.until_batch(1)
    stop_the_trainer(run)
    interrupt(run)
    assert run.process.stderr is not None
    until(lambda: "once more stops now" in run.process.stderr.readline())
    interrupt(run)
    aborted = run.end()
    assert aborted.code == 130
    assert aborted.rows("metrics.jsonl")[-1]["batch"] == last_batch_on_disk(run)
    numbers = [row["batch"] for row in aborted.rows("metrics.jsonl")]
    assert numbers == list(range(len(numbers)))


def test_C10_a_trainer_that_stands_still_ends_the_run_with_3_by_its_name(bench: Bench):
    run = bench.start(*LONG, "run.stall_seconds=15", "run.on_stall=exit")
    run.until_batch(1)
    assert run._trainer is not None
    run._trainer.send_signal(signal.SIGSTOP)
    ended = run.end()
    assert ended.code == ended.recorded["code"] == 3
    assert "stalled: trainer: it has not made version" in ended.last_error
    assert re.search(r"WARNING nothing has moved for \d+ s; stalled: trainer", (run.directory / "events.log").read_text())
    assert ended.rows("pipeline.jsonl")[-1]["stalled_stage"] == "trainer"


def test_a_drain_that_the_trainer_holds_up_is_saved_and_says_so(bench: Bench):
    run = bench.start(*LONG, "run.drain_timeout_seconds=3")
    run.until_batch(1)
    stop_the_trainer(run)
    interrupt(run, signal.SIGTERM)
    ended = run.end()
    assert ended.code == ended.recorded["code"] == 143
    assert ended.rows("metrics.jsonl")[-1]["batch"] == last_batch_on_disk(run)


def test_a_time_limit_ends_the_run_before_it_saved_and_says_how_to_go_on(bench: Bench):
    started = time.monotonic()
    run = bench.start(*LONG, "run.stop_before_seconds=75", "run.drain_timeout_seconds=30", "run.shutdown_seconds=30")
    ended = run.end()
    assert time.monotonic() - started < 75
    assert ended.code == ended.recorded["code"] == 143
    assert ended.recorded["cause"] == "run.stop_before_seconds (75 s) is near: saved, to be taken up again with --resume"
    audit(ended, max_staleness=2)


def test_an_advantage_that_blocks_is_named_by_its_line_and_ends_the_run_where_it_is_to(bench: Bench):
    bench.world("def blocks(rewards):\n    while True:\n        time.sleep(1)\n")
    run = bench.start("rollout.advantage=world:blocks", "run.stall_seconds=15", "run.on_stall=exit")
    ended = run.end()
    assert ended.code == ended.recorded["code"] == 3
    assert "in blocks: time.sleep(1)" in ended.recorded["cause"]
    assert re.search(r"the event loop has not turned for \d+ s: it is blocked at ", ended.err)
