"""The error boundary: whatever the user's code does, a rollout or a failure with its cause comes back."""

import asyncio
import math
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from scripted_engine import Hold, Status, Tokens, replies
from small_models import CHARACTERS, SPECIAL

from headway import Outcome
from headway.errors import ConfigError, WorkerFailed
from headway.formats.wire import WorkerSpec
from headway.types import Failure, Prompt, Rollout, Score, ScoreRequest
from headway.worker.runtime import Runtime


def returning(outcome):
    async def environment(prompt, policy):
        talk = await policy.open([5])
        await talk.generate()
        return outcome

    return environment


async def test_a_rollout_says_whose_it_is_and_what_it_came_to(bench):
    reward: Any = np.float32(0.5)
    outcome = Outcome(reward, {"style": 1}, metadata={"tool": ["x"], "when": None})
    async with bench(returning(outcome), Tokens([30, 31], finish="length")) as b:
        rollout = await b.attempt(attempt=2)
    assert isinstance(rollout, Rollout)
    assert (rollout.group, rollout.member, rollout.attempt, rollout.prompt_id, rollout.environment) == (3, 1, 2, "p", "test")
    assert (rollout.reward, rollout.rewards, rollout.metadata) == (0.5, {"style": 1.0}, {"tool": ["x"], "when": None})
    assert (rollout.finish, rollout.turns, rollout.engine) == ("length", 1, b.engine.url)
    assert rollout.started <= rollout.finished


async def test_one_sampled_end_token_is_a_rollout(bench):
    async with bench(returning(Outcome(1.0)), Tokens([2])) as b:
        assert (await b.attempt()).sampled_tokens == 1


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, float("1e400"), "0.5", True, np.bool_(False), None, [1.0], 10**400])
async def test_what_is_no_finite_number_is_no_reward_and_is_not_tried_again(bench, reward):
    async with bench(returning(Outcome(reward)), Tokens([30])) as b:
        failure = await b.attempt()
    assert isinstance(failure, Failure)
    assert (failure.cause, failure.retryable, failure.sampled_tokens) == ("bad_reward", False, 1)


async def test_a_part_of_the_reward_must_be_a_number_too(bench):
    async with bench(returning(Outcome(1.0, {"style": math.nan})), Tokens([30])) as b:
        failure = await b.attempt()
    assert failure.cause == "bad_reward"
    assert "style" in failure.detail


async def test_no_reward_waits_for_the_scorer_where_there_is_one(bench):
    async def score(prompt, rollouts):
        return 1.0

    async with bench(returning(Outcome(None)), Tokens([30]), scorer=score) as b:
        rollout = await b.attempt()
    assert isinstance(rollout, Rollout)
    assert rollout.reward is None


@pytest.mark.parametrize(
    ("outcome", "says"),
    [(0.5, "must return a headway.Outcome"), (None, "must return a headway.Outcome"), (Outcome(1.0, metadata={"x": object()}), "object")],
)
async def test_an_outcome_that_cannot_be_kept_is_the_environments_error(bench, outcome, says):
    async with bench(returning(outcome), Tokens([30])) as b:
        failure = await b.attempt()
    assert (failure.cause, failure.retryable) == ("environment_error", False)
    assert says in failure.detail


async def test_a_rollout_without_a_sampled_token_is_an_empty_completion(bench):
    async def environment(prompt, policy):
        await policy.open([5])
        return Outcome(1.0)

    async with bench(environment, Tokens([30])) as b:
        failure = await b.attempt()
    assert (failure.cause, failure.retryable) == ("empty_completion", False)


async def test_what_the_environment_raises_comes_back_with_its_traceback(bench):
    async def environment(prompt, policy):
        talk = await policy.open([5])
        await talk.generate()
        raise KeyError("no such tool")

    async with bench(environment, Tokens([30, 31])) as b:
        failure = await b.attempt()
    assert (failure.cause, failure.retryable, failure.sampled_tokens) == ("environment_error", True, 2)
    assert "KeyError: 'no such tool'" in failure.detail
    assert "test_runtime.py" in failure.detail


async def test_an_error_before_the_first_turn_is_told_and_not_its_emptiness(bench):
    async def environment(prompt, policy):
        raise ConnectionError("tunnel is down")

    async with bench(environment, Tokens([30])) as b:
        failure = await b.attempt()
    assert failure.cause == "environment_error"
    assert "tunnel is down" in failure.detail


async def test_leaving_the_process_ends_the_attempt_only(bench):
    async def environment(prompt, policy):
        sys.exit(3)

    async with bench(environment, Tokens([30])) as b:
        assert (await b.attempt()).cause == "environment_error"


async def test_a_cancellation_from_within_is_the_environments_error(bench):
    async def environment(prompt, policy):
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task

    async with bench(environment, Tokens([30])) as b:
        failure = await b.attempt()
    assert (failure.cause, failure.retryable) == ("environment_error", True)


@pytest.mark.parametrize(
    ("script", "cause", "retryable"),
    [
        ([Tokens([30]), Status(500)], "engine_error", True),
        ([Tokens([30]), Tokens([30], logprobs=[])], "length_mismatch", False),
        ([Tokens([30]), Tokens([])], "empty_completion", False),
        ([Tokens([30]), Status(422)], "engine_error", False),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
async def test_an_engines_refusal_keeps_its_cause_through_the_users_code(bench, script, cause, retryable, wrapped):
    async def environment(prompt, policy):
        talk = await policy.open([5])
        await talk.generate()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(talk.generate())
        except* Exception as group:
            if wrapped:
                raise RuntimeError("agent failed") from group.exceptions[0]
            raise

    async with bench(environment, replies(*script)) as b:
        failure = await b.attempt()
    assert (failure.cause, failure.retryable) == (cause, retryable)
    assert failure.sampled_tokens >= 1


async def test_two_generations_at_once_in_one_conversation_are_refused(bench):
    async def environment(prompt, policy):
        talk = await policy.open([5])
        await asyncio.gather(talk.generate(), talk.generate())

    async with bench(environment, Tokens([30])) as b:
        assert "await one turn before the next" in (await b.attempt()).detail


# Cancellation ---------------------------------------------------------------------------------------------------------------------------


async def test_D07_cancelling_reaches_the_users_code_and_waits_for_its_clean_up(bench):
    log = []

    async def environment(prompt, policy):
        talk = await policy.open([5])
        try:
            await talk.generate()
        finally:
            log.append("cancelled")
            await asyncio.sleep(0.01)
            log.append("clean")

    async with bench(environment, Hold(asyncio.Event())) as b:
        task = asyncio.create_task(b.attempt())
        await b.engine.until(lambda: b.engine.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["cancelled", "clean"]
        await b.engine.until(lambda: b.engine.gone == 1)


async def test_clean_up_has_a_budget(bench):
    started, stubborn = asyncio.Event(), asyncio.Event()

    async def environment(prompt, policy):
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            try:
                await asyncio.Event().wait()  # a sandbox that never answers
            finally:
                stubborn.set()

    async with bench(environment, Tokens([1]), cleanup_seconds=0.05) as b:
        task = asyncio.create_task(b.attempt())
        await started.wait()
        task.cancel()
        async with asyncio.timeout(120):
            with pytest.raises(asyncio.CancelledError):
                await task
            await stubborn.wait()


async def test_clean_up_that_has_used_its_budget_gets_no_second_one_at_the_close(bench):
    started, release = asyncio.Event(), asyncio.Event()

    async def environment(prompt, policy):
        started.set()
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    async with bench(environment, Tokens([1]), cleanup_seconds=0.5) as b:
        task = asyncio.create_task(b.attempt())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        closing = asyncio.create_task(b.worker.close())
        for _ in range(1000):  # turns of the loop, which no timer is waited for in
            await asyncio.sleep(0)
        assert closing.done()
        release.set()


async def test_closing_ends_what_runs_and_refuses_what_comes(bench):
    async def environment(prompt, policy):
        await asyncio.Event().wait()

    async with bench(environment, Tokens([1])) as b:
        task = asyncio.create_task(b.attempt())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await b.worker.close()
        assert (await task).cause == "cancelled"
        with pytest.raises(WorkerFailed):
            await b.attempt()


# Scoring --------------------------------------------------------------------------------------------------------------------------------


async def scored(bench, scorer, count=2, script=None):
    async with bench(returning(Outcome(None, metadata={"n": 1})), script or Tokens([60, 61, 2]), scorer=scorer) as b:
        rollouts = tuple([await b.attempt() for _ in range(count)])
        return await b.worker.score(ScoreRequest(3, Prompt("p", 0, {"answer": "42"}), rollouts))


async def test_a_scorer_sees_prompts_texts_tokens_and_metadata(bench):
    seen = []

    async def scorer(prompt, rollouts):
        for view in rollouts:
            seen.append(
                (prompt.fields["answer"], view.completion, view.turns, view.samples[0].token_ids.tolist(), view.metadata, view.finish)
            )
        return [1, None]

    assert await scored(bench, scorer) == [Score(1.0), Score(None)]
    text = "".join(CHARACTERS[i - len(SPECIAL)] for i in (60, 61))
    assert seen == [("42", text, [text], [5, 60, 61, 2], {"n": 1}, "stop")] * 2


async def test_a_completion_that_is_nothing_but_its_end_is_an_empty_text_to_a_scorer_too(bench):
    seen = []

    async def environment(prompt, policy):
        talk = await policy.open([5])
        seen.append((await talk.generate()).text)
        return Outcome(None)

    def scorer(prompt, rollouts):
        seen.append(rollouts[0].completion)
        return 0.0

    async with bench(environment, Tokens([2]), scorer=scorer) as b:
        rollout = await b.attempt()
        await b.worker.score(ScoreRequest(3, Prompt("p", 0, {}), (rollout,)))
    assert seen == ["", ""]


async def test_a_plain_scorer_and_named_parts_and_a_single_verdict_will_do(bench):
    def scorer(prompt, rollouts):
        return Score(0.5, {"judge": 0.5, "broken": math.nan})

    assert await scored(bench, scorer, count=1) == [Score(0.5, {"judge": 0.5})]


async def test_verdicts_that_are_no_numbers_are_no_scores(bench):
    async def scorer(prompt, rollouts):
        return [math.nan, True]

    assert await scored(bench, scorer) == [Score(None), Score(None)]


@pytest.mark.parametrize("verdict", [1.0, [1.0], [1.0, 1.0, 1.0], "ab"])
async def test_verdicts_that_do_not_match_the_rollouts_are_score_errors(bench, verdict):
    async def scorer(prompt, rollouts):
        return verdict

    failure = await scored(bench, scorer)
    assert (failure.cause, failure.retryable) == ("score_error", False)


async def test_a_scorer_that_raises_is_a_score_error_with_its_traceback(bench):
    async def scorer(prompt, rollouts):
        raise ValueError("judge is out")

    failure = await scored(bench, scorer)
    assert (failure.cause, failure.retryable) == ("score_error", True)
    assert "judge is out" in failure.detail


# Loading --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "entry", "says"),
    [
        ("raise RuntimeError('boom')", "attempt", "does not import: RuntimeError: boom"),
        ("x = 1", "attempt", 'has no "attempt"'),
        ("def attempt(prompt, policy): ...", "attempt", "async def attempt"),
    ],
)
def test_an_environment_that_cannot_be_run_is_a_config_error(tmp_path, model, module, entry, says):
    name = f"environment_{abs(hash(module))}"
    (tmp_path / f"{name}.py").write_text(module)
    with pytest.raises(ConfigError, match=says) as caught:
        Runtime.load(WorkerSpec(entry=f"{name}:{entry}", base=str(tmp_path), model=str(model), lineage="abc"))
    assert ("boom" in module) == ("Traceback" in caught.value.detail)


def test_a_model_without_a_tokenizer_is_a_config_error(tmp_path):
    (tmp_path / "environment_fine.py").write_text("async def attempt(prompt, policy): ...")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Runtime.load(WorkerSpec(entry="environment_fine:attempt", base=str(tmp_path), model=str(tmp_path), lineage="abc"))
