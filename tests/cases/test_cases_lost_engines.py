"""Fault cases of engines that die under a run, as a person would see them: real processes, killed; all invariants hold afterwards."""

import pytest
from held_runs import go_on, hold

from headway.testing import EngineScript, Stage

pytestmark = pytest.mark.e2e

SLOW = EngineScript(token_seconds=0.03)


@pytest.mark.parametrize("speaks", ["vllm", "sglang"])
def test_C01_the_only_engine_is_killed_and_never_comes_back(tmp_path, speaks):
    settings = {"run.steps": 1000, "engine.kind": speaks, "engine.lost_timeout_seconds": 2, "rollout.timeout_seconds": 0}
    with Stage(tmp_path, engines=[EngineScript(speaks=speaks, token_seconds=0.03)], settings=settings) as stage:
        run = stage.start()
        stage.until_batch(1)
        stage.engines[0].kill()
        ended = run.end()
        assert ended.code == 1
        assert "no engine has served for 2 s (engine.lost_timeout_seconds): engine-0 was lost: " in ended.last_error
        assert "cannot be reached" in ended.last_error
        assert ended.err.rstrip().splitlines()[-1].endswith("[engine]")
        stage.check(ended)


def test_one_of_two_engines_is_killed_for_good_and_the_run_completes(tmp_path):
    with Stage(tmp_path, engines=[SLOW, SLOW], settings={"run.steps": 12, "rollout.max_attempts": 1}) as stage:
        hold(stage, 8)
        run = stage.start()
        stage.until_batch(2)
        stage.engines[0].kill()
        stage.until(lambda: any(row["engines"]["engine-0"] == "lost" for row in stage.rows("pipeline.jsonl")[-1:]), what="it is lost")
        go_on(stage)
        ended = run.end()
        assert ended.code == 0, ended.err
        stage.check(ended)
        rows = stage.rows("pipeline.jsonl")
        assert rows[-1]["engines"]["engine-0"] == "lost"
        assert sum(rows[-1]["dropped"].values()) == 0  # who ran there ran elsewhere: nobody has failed
        assert len(stage.rows("metrics.jsonl")) == 12


def test_the_only_engine_is_killed_and_started_anew_with_other_weights(tmp_path):
    with Stage(tmp_path, engines=[SLOW], settings={"run.steps": 8, "rollout.max_attempts": 1}) as stage:
        hold(stage, 5)
        run = stage.start()
        stage.until_batch(2)
        stage.engines[0].kill()
        stage.engines[0].start()  # it says "default"
        go_on(stage)
        ended = run.end()
        assert ended.code == 0, ended.err
        stage.check(ended)
        assert len(stage.rows("metrics.jsonl")) == 8
        assert sum(stage.rows("pipeline.jsonl")[-1]["dropped"].values()) == 0


def test_an_engine_that_is_not_up_yet_when_the_run_starts_is_waited_for(tmp_path):
    with Stage(tmp_path, engines=[SLOW], settings={"run.steps": 2}) as stage:
        stage.engines[0].kill()
        run = stage.start()
        events = stage.run / "events.log"
        stage.until(lambda: events.exists() and "may not be up yet" in events.read_text())
        stage.engines[0].start()
        ended = run.end()
        assert ended.code == 0, ended.err
        stage.check(ended)
