"""The generating client at a vLLM without --enable-scale-out: /v1/completions, with exact ids and conservative stamps."""

import json

import pytest
from held_ports import held_ports
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from mutations import ended, hostile_json, is_one_short_line

from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.generation import Ask, ContextExceeded, GenerationFailed, Labels, Stamps
from headway.adapters.engines.vllm.completions import encode_request, read_answer
from headway.testing import FakeEngine, Reply, Rule
from headway.testing.engine.script import EngineScript
from headway.types import EngineAddress, SamplingParams

LABELS = Labels("run")
ASK = Ask("r", [1], max_tokens=8, temperature=1.0, top_p=1.0, top_k=0, seed=1)
ANSWER = {
    "id": "cmpl-r",
    "choices": [
        {
            "index": 0,
            "text": "",
            "token_ids": [5, 6],
            "finish_reason": "stop",
            "logprobs": {"token_logprobs": [-0.5, -1]},
        }
    ],
}


@pytest.fixture
async def client():
    client = EngineClient("run", retries=2)
    yield client
    await client.close()


def completing(*rules, port=0, **script):
    return FakeEngine(rules, script=EngineScript(**{"speaks": "vllm", "label": "run-3", "generate_route": False, **script}), port=port)


async def generate(client, engine, *, prompt=(1, 5, 6), max_tokens=8, **more):
    return await client.generate(
        EngineAddress(engine.url), list(prompt), SamplingParams(), seed=7, max_tokens=max_tokens, request_id="train-4-2-1-1", **more
    )


def test_a_request_leaves_nothing_about_sampling_to_the_models_own_defaults():
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    always = {"request_id", "prompt", "max_tokens", "temperature", "seed", "logprobs", "return_token_ids", "stream", *neutral}
    body = json.loads(encode_request(ASK))
    assert body.keys() == always
    assert {key: body[key] for key in neutral} == neutral
    assert (body["prompt"], body["logprobs"], body["return_token_ids"], body["stream"]) == ([1], 0, True, False)
    more = json.loads(encode_request(replace(ASK, top_p=0.5, top_k=4, stop_token_ids=[2], model="run-3")))
    assert {key: more[key] for key in more.keys() - always} == {"stop_token_ids": [2], "model": "run-3"}
    assert {key: more[key] for key in neutral} == neutral | {"top_p": 0.5, "top_k": 4}


async def test_a_server_without_the_route_is_asked_for_completions_and_that_is_remembered(client):
    async with completing() as engine:
        first, second = await generate(client, engine), await generate(client, engine)
        assert {entry["path"] for entry in engine.log.of("arrived")} == {"/v1/completions"}
        asked = [entry["path"] for entry in engine.log.of("asked")]
    assert first == second
    assert first.spans == [(0, 3)]
    assert asked.count("/weight_info") >= 2, "before each request"


async def test_a_server_that_comes_back_with_the_route_is_asked_there_again(client):
    with held_ports() as port:
        async with completing(port=port) as engine:
            await generate(client, engine)
        async with FakeEngine(script=EngineScript(speaks="vllm", label="run-3"), port=port) as engine:
            engine.rules = [Rule(nth=(1,), do=Reply(cut=True))]
            await generate(client, engine)
            assert [entry["path"] for entry in engine.log.of("arrived")][-1] == "/inference/v1/generate"


async def test_the_stamp_is_what_was_served_before_the_request_however_new_its_last_token(client):
    """The label changes while the request is under way: at worst older than what wrote the tokens."""
    async with completing(Rule(do=Reply(ids=(20, 21, 22), token_seconds=0.02))) as engine:
        await generate(client, engine)  # the route is known

        def relabel(*_):
            engine.weights.label = "run-4"

        engine.log.listeners.append(lambda: relabel() if len(engine.log.of("arrived")) == 2 else None)
        assert (await generate(client, engine)).spans == [(0, 3)]
        assert (await generate(client, engine)).spans == [(0, 4)]


async def test_a_server_that_does_not_say_what_it_serves_is_refused(client):
    async with completing(Rule(match={"path": "/weight_info"}, do=Reply(status=404))) as engine:
        with pytest.raises(GenerationFailed, match="nobody knows which ones wrote"):
            await generate(client, engine)


async def test_a_label_that_cannot_be_asked_for_is_asked_for_again_before_anything_is_generated(client):
    async with completing(Rule(match={"path": "/weight_info"}, nth=(1, 2), do=Reply(cut=True))) as engine:
        assert (await generate(client, engine)).spans == [(0, 3)]
        assert len(engine.log.of("arrived")) == 1


async def test_a_server_with_neither_route_is_refused_with_what_it_says():
    client = EngineClient("run", retries=2)
    async with FakeEngine(script=EngineScript(speaks="sglang")) as engine:
        with pytest.raises(GenerationFailed, match="/v1/completions answered 404") as caught:
            await generate(client, engine)
    await client.close()
    assert not caught.value.retryable


async def test_F06_an_aborted_generation_goes_on_with_its_prefix_and_what_is_left_of_the_budget(client):
    async with completing(Rule(nth=(1,), do=Reply(ids=(20, 21), finish="abort")), Rule(do=Reply(ids=(22, 2)))) as engine:
        got = await generate(client, engine)
        arrived = engine.log.of("arrived")
    assert (got.token_ids, got.spans) == ([20, 21, 22, 2], [(0, 3)])
    assert [entry["max_tokens"] for entry in arrived] == [8, 6]


@pytest.mark.parametrize("lie", ["fewer", "more", "none", "absent"])
async def test_F03_logprobs_that_are_not_one_per_token_are_refused(client, lie):
    async with completing(Rule(do=Reply(ids=(20, 21), logprobs=lie))) as engine:
        with pytest.raises(GenerationFailed) as caught:
            await generate(client, engine)
    assert caught.value.cause == "length_mismatch"


async def test_H09_a_prompt_over_the_context_is_told_apart(client):
    async with completing(context=16) as engine:
        with pytest.raises(ContextExceeded):
            await generate(client, engine, prompt=[5] * 16)
        assert len(engine.log.of("arrived")) == 1


async def test_a_budget_that_is_refused_with_its_prompt_is_cut_to_what_fits(client):
    refusal = "This model's maximum context length is 16 tokens. However, you requested 60 tokens (10 in the prompt, 50 in the completion)."
    async with completing(Rule(nth=(1,), do=Reply(status=400, text=refusal)), context=16) as engine:
        await generate(client, engine, prompt=[5] * 10, max_tokens=50)
        assert [entry["max_tokens"] for entry in engine.log.of("arrived")] == [6, 6]


def test_answers_without_ids_are_never_read_from_text():
    answer = {"choices": [{"text": "a b", "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5]}}]}
    with pytest.raises(GenerationFailed, match="knows no return_token_ids"):
        read_answer(json.dumps(answer).encode(), ASK, Stamps(LABELS, "run-1"))


@settings(max_examples=200, deadline=None)
@given(hostile_json(ANSWER), st.sampled_from([None, "run-0", "default"]))
def test_any_answer_is_usable_or_refused_by_name(body, oldest):
    part = ended(lambda data: read_answer(data, ASK, Stamps(LABELS, oldest)), body)
    if isinstance(part, GenerationFailed):
        assert is_one_short_line(part)
        return
    assert len(part.token_ids) == len(part.logprobs) <= 8
    assert bool(part.spans) == bool(part.token_ids)
