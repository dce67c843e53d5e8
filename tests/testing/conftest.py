"""One good run between fakes, played once for all tests here; each test breaks a copy of its own."""

import shutil

import pytest
from broken_runs import Scene

from headway.testing import Act, EngineScript, EnvironmentRule, EnvironmentScript, Fault, Reply, Rule, Stage, TrainerScript, Turn


@pytest.fixture(scope="session")
def good_run(tmp_path_factory):
    """A run with something of everything: two engines, two turns, aborts, a worker that is killed, errors, a NaN, an evaluation."""
    directory = tmp_path_factory.mktemp("good")
    engines = [
        EngineScript(token_seconds=0.002, rules=(Rule(match={"turn": 2}, every=6, do=Reply(ids=(20, 21), finish="abort")),)),
        EngineScript(rules=(Rule(every=9, do=Reply(logprobs="fewer")), Rule(match={"path": "/pause"}, nth=(2,), do=Reply(status=503)))),
    ]
    environment = EnvironmentScript(
        prompts=12,
        default=Act(turns=(Turn(max_tokens=5, observe="<"), Turn(max_tokens=5))),
        rules=(
            EnvironmentRule(nth=(9,), do=Act(fault=Fault(kill=True))),
            EnvironmentRule(nth=(12,), do=Act(reward="nan")),
            EnvironmentRule(nth=(14,), do=Act(fault=Fault(error="boo"))),
        ),
    )
    settings = {
        "run.steps": 5,
        "prompts.epochs": 3,
        "eval.every": 3,
        "eval.prompts": "headway.testing.environment:prompts",
        "eval.limit": 4,
    }
    with Stage(directory, engines=engines, environment=environment, trainer=TrainerScript(step_seconds=0.05), settings=settings) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err
        assert stage.trainer.process.wait(120) == 0  # it sees a moment later that the run has ended, and says so last
    return stage


@pytest.fixture
def scene(good_run, tmp_path):
    """A copy of the good run, to be broken."""
    shutil.copytree(good_run.run, tmp_path / "run")
    return Scene(tmp_path / "run", good_run)
