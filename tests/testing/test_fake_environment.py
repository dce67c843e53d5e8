"""The fake environment, run by the very runtime of rollout workers against the fake engine."""

import asyncio
import json
import math
import signal
import subprocess
import sys
from typing import Any

import pytest

from headway.formats.wire import WorkerSpec
from headway.testing import (
    Act,
    EngineScript,
    EnvironmentRule,
    EnvironmentScript,
    FakeEngine,
    Fault,
    Reply,
    Rule,
    Turn,
    environment,
    ids_of,
    read_log,
    write_tiny_model,
)
from headway.types import AttemptRequest, Failure, Prompt, Rollout, SamplingParams, ScoreRequest
from headway.worker.runtime import Runtime

NO_POLICY: Any = None  # of attempts that end before they ask for anything


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Return a function that puts a script into force; the process forgets it afterwards."""

    def use(**script):
        environment._script.cache_clear()
        environment._log.cache_clear()
        [(name, path)] = EnvironmentScript(**script).write(tmp_path).items()
        monkeypatch.setenv(name, path)

    yield use
    environment._script.cache_clear()
    environment._log.cache_clear()


async def attempts(model, *members, rules=(), prompt="p0001", **settings):
    """Play attempts one after the other; returns what the runtime answers."""
    async with FakeEngine(rules, script=EngineScript(label="run-0")) as engine:
        names = {"entry": "headway.testing.environment:attempt", "base": ".", "model": str(model), "lineage": "run", **settings}
        fields: dict[str, Any] = {"score": "", "name": "", "cleanup_seconds": 60.0, "truncated_reward": 0.0} | names
        runtime = Runtime.load(WorkerSpec(**{key: value for key, value in fields.items() if key in WorkerSpec.__struct_fields__}))
        answers = []
        for member in members or (0,):
            request = AttemptRequest(3, member, 1, Prompt(prompt, 0, {}), "train", engine.url, 17 + member, SamplingParams(max_tokens=6), 0)
            answers.append(await runtime.attempt(request))
        await runtime.close()
        return answers


def entries(tmp_path, *what):
    return [entry for entry in read_log(tmp_path / "environment.jsonl") if entry["what"] in what]


async def test_turns_observations_and_conversations_are_played_as_scripted(scripted, model, tmp_path):
    scripted(default=Act(turns=(Turn(max_tokens=3, observe="<"), Turn(max_tokens=3)), conversations=2, rewards={"form": 0.5}))
    [rollout] = await attempts(model)
    assert isinstance(rollout, Rollout)
    assert (rollout.samples, rollout.turns, rollout.rewards) == (2, 4, {"form": 0.5})
    steps = entries(tmp_path, "step")
    assert [(step["turn"], step["member"]) for step in steps] == [(1, 0), (2, 0), (1, 0), (2, 0)]
    assert [entry["what"] for entry in entries(tmp_path, "reset", "close")] == ["reset", "close"]


async def test_rewards_vary_by_what_was_sampled_unless_a_script_says_otherwise(scripted, model):
    scripted()
    rewards = {rollout.reward for rollout in await attempts(model, 0, 1, 2, 3)}
    assert len(rewards) > 1


@pytest.mark.parametrize("reward", ["nan", "inf", "-inf", "0.5", True, None])
async def test_wrong_rewards_arrive_as_they_are_and_are_refused(scripted, model, reward):
    scripted(default=Act(reward=reward))
    [failure] = await attempts(model)
    assert isinstance(failure, Failure)
    assert failure.cause == "bad_reward"
    shown = {"nan": "nan", "inf": "inf", "-inf": "-inf", "0.5": "'0.5'"}.get(reward, repr(reward))
    assert f"the reward is {shown}" in failure.detail
    assert math.isnan(environment._reward("nan", []))


async def test_an_error_is_raised_where_the_script_says_and_the_attempt_is_closed(scripted, model, tmp_path):
    scripted(default=Act(turns=(Turn(), Turn(fault=Fault(error="boo")))))
    [failure] = await attempts(model)
    assert (failure.cause, failure.detail.startswith("RuntimeError: boo")) == ("environment_error", True)
    assert [entry["what"] for entry in entries(tmp_path, "reset", "step", "raised", "close")] == ["reset", "step", "raised", "close"]


async def test_an_attempt_without_turns_has_no_tokens(scripted, model):
    scripted(default=Act(turns=(), reward=1.0))
    [failure] = await attempts(model)
    assert failure.cause == "empty_completion"


async def test_cancelling_from_within_is_an_error_of_the_environment(scripted, model):
    scripted(default=Act(fault=Fault(cancel=True)))
    [failure] = await attempts(model)
    assert failure.cause == "environment_error"


@pytest.mark.parametrize(("text", "observed"), [('{"a": 1}', "ok"), ('{"a": ', "error")])
async def test_a_tool_call_is_parsed_and_one_that_is_none_is_answered_by_an_error(scripted, model, text, observed):
    scripted(default=Act(turns=(Turn(tool=True, observe="ok", tool_error="error", max_tokens=20), Turn())))
    async with FakeEngine([Rule(match={"turn": 1}, do=Reply(ids=tuple(ids_of(text))))], script=EngineScript(label="run-0")) as engine:
        runtime = Runtime.load(
            WorkerSpec(
                entry="headway.testing.environment:attempt",
                score="",
                base=".",
                model=str(model),
                name="",
                lineage="run",
                cleanup_seconds=60.0,
            )
        )
        request = AttemptRequest(3, 0, 1, Prompt("p1", 0, {}), "train", engine.url, 1, SamplingParams(max_tokens=6), 0)
        await runtime.attempt(request)
        await runtime.close()
        second = engine.log.of("arrived")[1]["prompt"]
    assert second[-len(observed) :] == ids_of(observed)


async def test_rules_match_attempts_by_what_they_are(scripted, model):
    scripted(rules=(EnvironmentRule(match={"member": [1, 2], "purpose": "train", "prompt": "p000*"}, do=Act(reward=0.25)),))
    rewards = [rollout.reward for rollout in await attempts(model, 0, 1, 2)]
    assert rewards[1:] == [0.25, 0.25]
    assert rewards[0] != 0.25


def test_counts_of_rules_are_shared_by_all_processes(scripted, model, tmp_path):
    scripted(rules=(EnvironmentRule(nth=(3,), do=Act(reward=0.25)),))
    code = "from headway.testing import environment as e; print(e._act({'prompt': 'x', 'what': 'attempt'}).reward)"
    outputs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() for _ in range(3)]
    assert outputs == ["sampled", "sampled", "0.25"]


@pytest.mark.parametrize(("fault", "code"), [(Fault(exit=3), 3), (Fault(kill=True), -signal.SIGKILL)])
def test_it_ends_its_process_as_scripted(scripted, fault, code):
    scripted(default=Act(fault=fault))
    program = (
        "import asyncio; from headway.testing import environment as e; from headway.types import Prompt; "
        "asyncio.run(e.attempt(Prompt('p', 0, {}), None))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == code


async def test_cancelled_it_says_so_and_takes_its_time_to_close(scripted, tmp_path):
    scripted(default=Act(fault=Fault(hang=True), close_seconds=0.01))
    playing = asyncio.create_task(environment.attempt(Prompt("p", 0, {}), NO_POLICY))
    while not entries(tmp_path, "reset"):  # noqa: ASYNC110 -- a file tells
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    cancelled, closed = entries(tmp_path, "cancel", "close")
    assert closed["time"] - cancelled["time"] >= 0.009


async def test_what_it_spawns_is_left_running(scripted, tmp_path):
    scripted(default=Act(fault=Fault(spawn=("sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 600"), error="gone")))
    with pytest.raises(RuntimeError):
        await environment.attempt(Prompt("p", 0, {}), NO_POLICY)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():  # noqa: ASYNC110 -- another process
        await asyncio.sleep(0)
    left = environment._spawned.pop()
    assert left.pid == int((tmp_path / "pid").read_text())
    assert left.poll() is None
    left.kill()
    left.wait()


async def test_a_scorer_scores_by_its_own_rules(scripted, model, tmp_path):
    rule = EnvironmentRule(match={"what": "score", "prompt": "p0001"}, do=Act(reward=0.75, rewards={"judge": 1.0}))
    scripted(rules=(rule,), default=Act(reward=None), default_score=Act(reward=None))
    names: dict[str, Any] = {"entry": "headway.testing.environment:attempt", "score": "headway.testing.environment:score"}
    [rollout] = await attempts(model, **names)
    runtime = Runtime.load(WorkerSpec(base=".", model=str(model), name="", lineage="run", cleanup_seconds=60.0, **names))
    by_rule, without = [await runtime.score(ScoreRequest(3, Prompt(prompt, 0, {}), (rollout,))) for prompt in ("p0001", "p0002")]
    assert not isinstance(by_rule, Failure)
    assert not isinstance(without, Failure)
    [score], [nobody] = by_rule, without
    await runtime.close()
    assert (score.reward, score.rewards, nobody.reward) == (0.75, {"judge": 1.0}, None)
    assert [entry["prompt"] for entry in entries(tmp_path, "score")] == ["p0001", "p0002"]


def test_prompts_are_as_many_as_scripted_or_without_end(scripted):
    scripted(prompts=3)
    assert [prompt["id"] for prompt in environment.prompts()] == ["p0000", "p0001", "p0002"]
    stream = environment.prompt_stream()
    assert [next(stream)["id"] for _ in range(5)][-1] == "p0004"


def test_a_script_is_strict_json(tmp_path):
    EnvironmentScript(rules=(EnvironmentRule(do=Act(reward="nan")),)).write(tmp_path)
    json.loads((tmp_path / "environment.script.json").read_text(), parse_constant=pytest.fail)
