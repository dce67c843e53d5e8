"""kill -9 of the engine, the trainer or a worker: the run goes on, trains each batch once, and says what happened."""

import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from killed_runs import SLOW, logged, trained_once
from real_runs import Bench, Run, history, until

from headway.events import EngineState, Published, RolloutDropped

pytestmark = [pytest.mark.e2e, pytest.mark.torch]


def kill(run: Run, word: str) -> int:
    """Kill a child, and return its pid."""
    child = run.child(word)
    child.kill()
    return child.pid


def until_again(run: Run, word: str, before: int) -> psutil.Process:
    """Wait until a successor of the process `before` has been started."""

    def successors() -> list[psutil.Process]:
        return [process for process in run.marked(word) if process.pid not in {before, run.process.pid}]

    until(successors, what=f"{word} is started again")
    return successors()[0]


def test_kill_9_of_the_engine_and_the_run_goes_on(bench: Bench):
    bench.hold(3)
    run = bench.start("run.steps=12", *SLOW, attached=False)
    run.until_batch(3)
    first = kill(run, " engine ")
    until_again(run, " engine ", first)
    bench.go_on()
    ended = run.end()
    trained_once(ended, 12)
    how = r"WARNING engine-0 ended unexpectedly \(killed by SIGKILL\)(: .*)?; its log: \S*0\.log\. It is started again"
    assert re.search(how, logged(ended))
    assert ended.rows("pipeline.jsonl")[-1]["engine_restarts"] == 1
    told = [(event.state, event.label) for event in history(ended) if isinstance(event, EngineState)]
    lost = next(index for index, (state, _) in enumerate(told) if state == "lost")
    assert told[lost + 1][0] == "serving"
    assert int(told[lost + 1][1].partition("-")[2]) >= int(told[lost][1].partition("-")[2]) > 0  # not the weights of the start
    assert not any(event.final for event in history(ended) if isinstance(event, RolloutDropped))


def test_kill_9_of_the_trainer_and_the_run_goes_on(bench: Bench):
    bench.hold(3)
    run = bench.start("run.steps=12", *SLOW, attached=False)
    run.until_batch(3)
    first = kill(run, " trainer ")
    second = until_again(run, " trainer ", first)
    bench.hold(8)
    run.until_batch(8)
    second.kill()
    bench.go_on()
    ended = run.end()
    trained_once(ended, 12)
    assert "trainer ended unexpectedly (killed by SIGKILL)" in logged(ended)
    assert ended.err.count("headway: trainer ended unexpectedly (killed by SIGKILL)") == 2
    assert "headway: trainer is up again\n" in ended.err
    assert ended.rows("pipeline.jsonl")[-1]["trainer_restarts"] == 2
    assert [event.version for event in history(ended) if isinstance(event, Published)][-1] == 12


def test_a_trainer_that_was_told_to_end_by_somebody_else_is_started_again(bench: Bench):
    bench.hold(2)
    run = bench.start("run.steps=6", *SLOW, attached=False)
    run.until_batch(2)
    run.child(" trainer ").send_signal(signal.SIGTERM)  # it ends in order, with exit code 0
    bench.go_on()
    ended = run.end()
    trained_once(ended, 6)
    assert "trainer ended unexpectedly (exit code 0)" in logged(ended)


@pytest.mark.parametrize(("child", "name", "key"), [("trainer", "trainer", "trainer"), ("engine", "engine-0", "engine")])
def test_one_that_dies_again_and_again_ends_the_run_by_name(bench: Bench, child: str, name: str, key: str):
    run = bench.start("run.steps=100000", f"{key}.max_restarts=1", "environment.entry=world:slow", attached=False)
    run.until_batch(3)
    while run.process.poll() is None:  # whoever comes up: one that was alive for long enough to get on does not count
        for process in run.marked(f" {child} "):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    ended = run.end()
    assert ended.code == 1
    assert ended.last_error.startswith(f"headway: {name} ended ")
    log = re.escape(str(run.directory / "logs" / f"{name}.log"))
    again = rf"; its log: {log}; it had been started again 1 times in a row \({key}\.max_restarts\)"
    assert re.search(r"\(killed by SIGKILL\)(: .*)?" + again, ended.last_error)  # it may have had the time to log something
    assert ended.recorded["cause"].startswith("EngineFailed" if key == "engine" else "TrainerFailed")


def test_what_a_trainer_states_on_purpose_is_not_tried_again(bench: Bench):
    run = bench.start("run.steps=100000", *SLOW, attached=False)
    run.until_batch(2)
    trainer, damaged = run.child(" trainer "), set[Path]()
    while run.process.poll() is None and trainer.is_running():
        with suppress(psutil.NoSuchProcess):  # it has met a damaged batch
            trainer.suspend()
            for batch in set((run.directory / "batches").glob("0*/batch.safetensors")) - damaged:
                batch.write_bytes(batch.read_bytes()[:-1])
                damaged.add(batch)
            trainer.resume()
            with suppress(psutil.TimeoutExpired):
                trainer.wait(0.05)
    ended = run.end(sabotaged=True)
    assert ended.code == 1
    assert "trainer ended unexpectedly (exit code 1)" in ended.last_error
    assert "batch.safetensors" in ended.last_error
    assert ended.recorded["kind"] == "trainer"
    assert "started again" not in logged(ended)
