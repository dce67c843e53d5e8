"""Several launched engines: headway's own, two of them, of which one dies; and vLLM servers that wait for a trainer's version 0."""

import re

import pytest
from killed_runs import SLOW, logged, trained_once
from real_runs import Bench, until
from stand_in_servers import started, write_stand_ins

pytestmark = [pytest.mark.e2e, pytest.mark.torch]


def test_two_engines_of_headways_own_one_of_which_is_killed(bench: Bench):
    bench.hold(3)
    run = bench.start("run.steps=12", "engine.count=2", *SLOW, attached=False)
    run.until_batch(3)
    first, second = sorted(process.pid for process in run.marked(" engine ") if process.pid != run.process.pid)
    [victim] = [process for process in run.marked(" engine ") if process.pid == second]
    victim.kill()
    until(lambda: {process.pid for process in run.marked(" engine ")} - {first, second, run.process.pid}, what="it is started again")
    bench.go_on()
    ended = run.end()
    trained_once(ended, 12)
    assert ended.rows("pipeline.jsonl")[-1]["engine_restarts"] == 1
    assert len(set(re.findall(r"(engine-[01]) ended unexpectedly \(killed by SIGKILL\)", logged(ended)))) == 1
    assert {log.name for log in (run.directory / "logs").glob("engine-*")} == {"engine-0.log", "engine-1.log"}
    assert set(re.findall(r"engine-\d is ready", logged(ended))) == {"engine-0 is ready", "engine-1 is ready"}


def test_servers_are_started_when_the_trainer_has_made_version_0(bench: Bench):
    packages = write_stand_ins(bench.directory / "packages")
    settings = [
        "engine.launch=vllm",
        f'engine.environment=["PYTHONPATH={packages}", "STAND_IN_LOG={bench.directory}"]',
    ]
    run = bench.start(*settings, attached=False)
    until(lambda: started(bench.directory), what="the server is started")
    assert (run.directory / "weights" / "00000000" / "manifest.json").exists()
    [server] = started(bench.directory)
    assert server["model"] == str(run.directory / "weights" / "00000000")
    run.kill()  # a stand-in's ids are not this model's
