"""A stage plays real runs: to their end, killed and taken up again, with engines and trainers that die meanwhile."""

import signal
from functools import partial

import pytest

from headway.testing import Act, EngineScript, EnvironmentScript, Fault, Stage, TrainerScript, Turn

pytestmark = pytest.mark.e2e

TWO_TURNS = EnvironmentScript(prompts=30, default=Act(turns=(Turn(max_tokens=5, observe="<"), Turn(max_tokens=5))))


def test_a_run_that_is_killed_again_and_again_keeps_all_invariants(tmp_path):
    engines = [EngineScript(token_seconds=0.03), EngineScript(token_seconds=0.01)]
    trainer = TrainerScript(step_seconds=0.1, die_at=3)
    with Stage(tmp_path, engines=engines, environment=TWO_TURNS, trainer=trainer, settings={"run.steps": 6}) as stage:
        for lives, finished in enumerate((5, 20, 40)):
            run = stage.start(resume=lives > 0)
            stage.until(
                partial(lambda finished: len(stage.environment_entries("close")) >= finished, finished), what=f"{finished} attempts"
            )
            killed = run.kill()
            assert killed.code == -signal.SIGKILL
            stage.check(killed)
        stage.start(resume=True)
        stage.until(lambda: any(entry["what"] == "died" for entry in stage.trainer.entries()))
        stage.trainer.start()
        ended = stage.runs[-1].end()
        assert ended.code == 0, ended.err
        stage.check(ended)
        assert len(stage.rows("metrics.jsonl")) == 6


def test_waiting_for_what_a_run_no_longer_does_tells_why(tmp_path):
    failing = EnvironmentScript(default=Act(fault=Fault(error="boo")))
    settings = {"run.max_consecutive_failures": 3}
    with Stage(tmp_path, environment=failing, settings=settings) as stage:
        stage.start()
        with pytest.raises(TimeoutError, match=r"(?s)the run ended: batch 0.*boo"):
            stage.until_batch(0)
        ended = stage.runs[0].end()
        assert ended.code == 1
        assert "boo" in ended.last_error
        stage.check(ended)
