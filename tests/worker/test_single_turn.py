"""`single_turn`: reward functions of both forms, weighed, and never blocking the loop."""

import asyncio
import threading

import pytest
from scripted_engine import Tokens
from small_models import EOS, ids_of

from headway import single_turn
from headway.types import Failure

HI = Tokens([*ids_of("hi"), EOS])


async def outcome(bench, reward, fields=None, **options):
    async with bench(single_turn(reward, **options), HI) as b:
        return await b.attempt(fields={"prompt": "<bos>say hi", "answer": "hi"} if fields is None else fields)


async def test_a_reward_of_prompt_and_completion(bench):
    def reward(prompt, completion):
        return float(completion.text == prompt.fields["answer"] and completion.token_ids[-1] == EOS and completion.finish == "stop")

    rollout = await outcome(bench, reward)
    assert (rollout.reward, rollout.rewards) == (1.0, {})


async def test_an_async_reward_is_awaited(bench):
    async def reward(prompt, completion):
        await asyncio.sleep(0)
        return 0.25

    assert (await outcome(bench, reward)).reward == 0.25


async def test_trls_form_gets_lists_of_one_and_every_column(bench):
    calls = []

    def accuracy(prompts, completions, answer, **kwargs):
        calls.append((prompts, completions, answer, sorted(kwargs)))
        return [1.0 if completion == expected else 0.0 for completion, expected in zip(completions, answer, strict=True)]

    assert (await outcome(bench, accuracy)).reward == 1.0
    assert calls == [(["<bos>say hi"], ["hi"], ["hi"], ["completion_ids"])]


async def test_trls_form_gets_messages_where_the_prompt_is_messages(bench):
    def accuracy(completions, answer):
        return [float(completion[0]["content"] == expected) for completion, expected in zip(completions, answer, strict=True)]

    fields = {"prompt": [{"role": "user", "content": "say hi"}], "answer": "hi", "other": 1}
    assert (await outcome(bench, accuracy, fields)).reward == 1.0


async def test_G03_several_rewards_are_weighed_and_those_that_cannot_tell_are_left_out(bench):
    def style(prompt, completion):
        return 0.5

    async def judge(completions, **kwargs):
        return [None]

    def accuracy(completions, **kwargs):
        return [1.0]

    rollout = await outcome(bench, [style, judge, accuracy], weights=[0.5, 7.0, 2.0])
    assert (rollout.reward, rollout.rewards) == (2.25, {"style": 0.5, "accuracy": 1.0})


async def test_G03_a_reward_that_nobody_can_tell_is_no_zero(bench):
    def judge(completions, **kwargs):
        return [None]

    failure = await outcome(bench, [judge, judge])
    assert isinstance(failure, Failure)
    assert failure.cause == "bad_reward"


@pytest.mark.parametrize("value", [True, "1.0", float("nan")])
async def test_a_value_that_is_no_number_is_refused_and_shown(bench, value):
    failure = await outcome(bench, [lambda prompt, completion: value, lambda prompt, completion: 1.0])
    assert failure.cause == "bad_reward"
    assert repr(value) in failure.detail


@pytest.mark.parametrize("values", [1.0, [], [1.0, 2.0], "x"])
async def test_trls_form_must_return_one_value_per_completion(bench, values):
    def reward(completions, **kwargs):
        return values

    failure = await outcome(bench, reward)
    assert failure.cause == "environment_error"
    assert "one value per completion" in failure.detail


async def test_O01_a_plain_reward_that_blocks_does_not_block_the_loop(bench):
    free = threading.Event()

    def reward(prompt, completion):
        assert free.wait(120)
        return 1.0

    async with bench(single_turn(reward), HI) as b:
        fields = {"prompt": "x"}
        tasks = [asyncio.create_task(b.attempt(fields=fields)) for _ in range(20)]
        await b.engine.until(lambda: len(b.engine.requests) == 20)
        free.set()
        assert {(await task).reward for task in tasks} == {1.0}


async def test_a_prompt_without_the_field_says_which(bench):
    failure = await outcome(bench, lambda prompt, completion: 1.0, {"question": "x"})
    assert 'has no field "prompt"' in failure.detail
    assert (await outcome(bench, lambda prompt, completion: 1.0, {"question": "x"}, prompt_field="question")).reward == 1.0


def test_rewards_and_weights_are_checked_when_the_environment_is_made():
    for wrong in ([], ["name"]):
        with pytest.raises(TypeError):
            single_turn(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 weights for 1"):
        single_turn(lambda prompt, completion: 1.0, weights=[1, 2])
