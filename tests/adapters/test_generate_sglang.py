"""The generating client at SGLang-speaking engines: exact ids, log-probabilities and spans, or a refusal by name."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from mutations import ended, hostile_json, is_one_short_line

from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.generation import Ask, ContextExceeded, Generated, GenerationFailed, Labels, Stamps
from headway.adapters.engines.sglang.wire import encode_request, read_answer
from headway.testing import FakeEngine, Reply, Rule
from headway.testing.engine.script import EngineScript, logprob_of
from headway.types import EngineAddress, SamplingParams

LABELS = Labels("run")
ASK = Ask("r", [1], max_tokens=8, temperature=1.0, top_p=1.0, top_k=0, seed=1)
ANSWER: dict[str, Any] = {
    "text": "",
    "output_ids": [5, 6, 7],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 7},
        "output_token_logprobs": [[-0.5, n, None] for n in (5, 6, 7)],
        "weight_version": "run-2",
        "weight_versions": [{"version": "run-1", "start": 0, "end": 2}, {"version": "run-2", "start": 2, "end": 3}],
    },
}


@pytest.fixture
async def client():
    client = EngineClient("run", retries=2, empty_aborts=3)
    yield client
    await client.close()


def sglang(*rules, **script):
    return FakeEngine(rules, script=EngineScript(**{"speaks": "sglang", "label": "run-3"} | script))


async def generate(client, engine, *, prompt=(1, 5, 6), max_tokens=8, seed=7, **more):
    address = EngineAddress(engine.url, "sglang")
    return await client.generate(
        address, list(prompt), SamplingParams(temperature=0.7), seed=seed, max_tokens=max_tokens, request_id="train-4-2-1-1", **more
    )


def meta(**changes):
    return json.dumps({**ANSWER, "meta_info": ANSWER["meta_info"] | changes}).encode()


async def test_ids_logprobs_spans_and_finish_come_back_as_the_engine_gave_them(client):
    async with sglang(Rule(do=Reply(ids=(20, 21, 2)))) as engine:
        got = await generate(client, engine, stop_token_ids=[2])
        [arrived] = engine.log.of("arrived")
    assert got.token_ids == [20, 21, 2]
    assert (got.spans, got.finish) == ([(0, 3)], "stop")
    assert len(got.logprobs) == 3
    assert (arrived["path"], arrived["prompt"], arrived["max_tokens"]) == ("/generate", [1, 5, 6], 8)
    assert (arrived["temperature"], arrived["seed"]) == (0.7, 7)
    assert arrived["request_id"].startswith("train-4-2-1-1-")


def test_a_request_says_what_is_on_and_nothing_else():
    body = json.loads(encode_request(replace(ASK, top_p=0.5, top_k=4, stop_token_ids=[2], model="run-3")))
    assert body == {
        "rid": "r",
        "input_ids": [1],
        "sampling_params": {
            "max_new_tokens": 8,
            "temperature": 1.0,
            "sampling_seed": 1,
            "top_p": 0.5,
            "top_k": 4,
            "stop_token_ids": [2],
            "no_stop_trim": True,
        },
        "return_logprob": True,
        "stream": False,
        "lora_path": "run-3",
    }
    assert json.loads(encode_request(ASK))["sampling_params"].keys() == {"max_new_tokens", "temperature", "sampling_seed", "no_stop_trim"}


def test_a_whole_answer_is_read():
    part = read_answer(json.dumps(ANSWER).encode(), ASK, Stamps(LABELS))
    assert part == ([5, 6, 7], [-0.5, -0.5, -0.5], [(0, 1), (2, 2)], "stop", True)


@settings(max_examples=300, deadline=None)
@given(hostile_json(ANSWER), st.sampled_from([None, "run-0", "other-1", "default"]))
def test_any_answer_is_usable_or_refused_by_name(body, oldest):
    part = ended(lambda data: read_answer(data, ASK, Stamps(LABELS, oldest)), body)
    if isinstance(part, GenerationFailed):
        assert is_one_short_line(part)
        return
    assert len(part.token_ids) == len(part.logprobs) <= 8
    assert part.finish in {"stop", "length", "abort"}
    assert bool(part.spans) == bool(part.token_ids)


@pytest.mark.parametrize(("lie", "retryable"), [("fewer", False), ("more", False), ("none", False), ("absent", False), ("nan", True)])
async def test_F03_logprobs_that_are_not_one_per_token_are_refused_and_asked_for_once(client, lie, retryable):
    async with sglang(Rule(do=Reply(ids=(20, 21), logprobs=lie))) as engine:
        with pytest.raises(GenerationFailed) as caught:
            await generate(client, engine)
        assert len(engine.log.of("arrived")) == 1
    assert caught.value.cause == ("engine_error" if lie == "nan" else "length_mismatch")
    assert caught.value.retryable == retryable


def test_logprobs_of_other_ids_are_refused():
    with pytest.raises(GenerationFailed, match="the logprob at 1 is of token 9, and the token is 6") as caught:
        read_answer(meta(output_token_logprobs=[[-0.5, 5, None], [-0.5, 9, None], [-0.5, 7, None]]), ASK, Stamps(LABELS))
    assert caught.value.cause == "length_mismatch"


def test_the_version_of_the_last_token_is_no_stamp_for_the_others():
    with pytest.raises(GenerationFailed, match="nobody knows which ones wrote"):
        read_answer(meta(weight_versions=None), ASK, Stamps(LABELS))
    assert read_answer(meta(weight_versions=None), ASK, Stamps(LABELS, "run-1")).spans == [(0, 1)]


@pytest.mark.parametrize("paths", [("/get_model_info",), ("/model_info",)])
async def test_an_engine_that_names_no_versions_gets_the_one_it_served_before_the_request_as_a_stamp(client, paths):
    gone = [Rule(match={"path": path}, do=Reply(status=404)) for path in {"/get_model_info", "/model_info"} - set(paths)]
    async with sglang(*gone, Rule(do=Reply(ids=(20, 21), spans="absent"))) as engine:
        assert (await generate(client, engine)).spans == [(0, 3)]
        engine.weights.label = "run-4"
        assert (await generate(client, engine)).spans == [(0, 4)]


async def test_a_label_of_another_run_is_refused(client):
    async with sglang(label="default") as engine:
        with pytest.raises(GenerationFailed, match='labelled "default", which are not of this run') as caught:
            await generate(client, engine)
    assert caught.value.lost


async def test_F06_an_aborted_generation_goes_on_with_its_prefix_and_what_is_left_of_the_budget(client):
    rules = [
        Rule(nth=(1,), do=Reply(ids=(20, 21), finish="abort")),
        Rule(nth=(1,), do=Reply(ids=(), finish="abort")),
        Rule(do=Reply(ids=(22, 2))),
    ]
    async with sglang(*rules) as engine:
        got = await generate(client, engine)
        arrived = engine.log.of("arrived")
    assert (got.token_ids, got.finish, got.spans) == ([20, 21, 22, 2], "stop", [(0, 3)])
    assert [entry["prompt"] for entry in arrived] == [[1, 5, 6], [1, 5, 6, 20, 21], [1, 5, 6, 20, 21]]
    assert [entry["max_tokens"] for entry in arrived] == [8, 6, 6]


async def test_F05_aborts_without_a_token_are_given_up_in_the_end(client):
    async with sglang(Rule(do=Reply(ids=(), finish="abort"))) as engine:
        with pytest.raises(GenerationFailed, match="aborted a generation 3 times in a row") as caught:
            await generate(client, engine)
        assert len(engine.log.of("arrived")) == 3
    assert not caught.value.retryable


@pytest.mark.parametrize(("status", "retryable"), [(400, False), (500, True)])
def test_F05_an_abort_with_a_status_is_a_refusal_and_not_continued(status, retryable):
    with pytest.raises(GenerationFailed, match="out of luck") as caught:
        read_answer(meta(finish_reason={"type": "abort", "message": "out of luck", "status_code": status}), ASK, Stamps(LABELS))
    assert caught.value.retryable == retryable


def test_an_abort_for_want_of_context_is_told_apart():
    with pytest.raises(ContextExceeded):
        read_answer(
            meta(finish_reason={"type": "abort", "message": "Input is longer than the context length", "status_code": 400}),
            ASK,
            Stamps(LABELS),
        )


@pytest.mark.parametrize("finish", [None, {"type": "error"}, {"type": None}, {}, "stop"])
def test_F05_only_a_generation_that_says_how_it_ended_counts(finish):
    with pytest.raises(GenerationFailed):
        read_answer(meta(finish_reason=finish), ASK, Stamps(LABELS))


async def test_a_completion_without_a_token_is_empty(client):
    async with sglang(Rule(do=Reply(ids=()))) as engine:
        with pytest.raises(GenerationFailed) as caught:
            await generate(client, engine)
    assert (caught.value.cause, caught.value.retryable) == ("empty_completion", False)


async def test_H09_a_prompt_over_the_context_is_told_apart_and_not_tried_again(client):
    async with sglang(context=16) as engine:
        with pytest.raises(ContextExceeded):
            await generate(client, engine, prompt=[5] * 16)
        assert len(engine.log.of("arrived")) == 1


async def test_a_budget_over_the_context_is_cut_to_what_fits_and_remembered(client):
    """SGLang refuses prompt and budget together, where vLLM cuts the budget."""
    async with sglang(Rule(do=Reply(tokens=100)), context=16) as engine:
        for requests in (2, 3):  # the first learns it
            got = await generate(client, engine, prompt=[5] * 10, max_tokens=50)
            assert (len(got.token_ids), got.finish) == (6, "length")
            assert len(engine.log.of("arrived")) == requests


async def test_ids_outside_the_vocabulary_are_refused_and_not_tried_again(client):
    async with sglang(vocabulary=100) as engine:
        with pytest.raises(GenerationFailed, match="vocab") as caught:
            await generate(client, engine, prompt=[1, 100])
        assert len(engine.log.of("arrived")) == 1
    assert (caught.value.cause, caught.value.retryable) == ("engine_error", False)
    for wrong in (-1, 2**31):
        with pytest.raises(GenerationFailed, match="cannot be read"):
            read_answer(json.dumps({**ANSWER, "output_ids": [5, wrong, 7]}).encode(), ASK, Stamps(LABELS))


async def test_I07_a_busy_engine_and_a_broken_connection_are_tried_again_a_bounded_number_of_times(client):
    for reply in (Reply(status=503), Reply(cut=True)):
        async with sglang(Rule(do=reply)) as engine:
            with pytest.raises(GenerationFailed, match="tried 3 times") as caught:
                await generate(client, engine)
            assert len(engine.log.of("arrived")) == 3
        assert (caught.value.retryable, caught.value.lost) == (False, True)


async def test_a_cancelled_generation_is_seen_by_the_engine(client):
    async with sglang(Rule(do=Reply(hang=True))) as engine:
        task = asyncio.create_task(generate(client, engine))
        await engine.until(lambda: engine.running == 1)
        task.cancel()
        await engine.until(lambda: engine.running == 0)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_I08_an_ipv6_engine_is_reached_and_proxies_are_ignored(client, monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with FakeEngine(script=EngineScript(speaks="sglang", label="run-3"), host="::1") as engine:
        got = await generate(client, engine)
    assert isinstance(got, Generated)
    assert got.token_ids


async def test_engines_of_both_kinds_are_spoken_to_by_one_client(client):
    async with sglang() as one, FakeEngine(script=EngineScript(speaks="vllm", label="run-4")) as other:
        first = await generate(client, one)
        second = await client.generate(EngineAddress(other.url), [1], SamplingParams(), seed=1, max_tokens=4, request_id="r")
    assert (first.spans, second.spans) == ([(0, 3)], [(0, 4)])
    assert second.logprobs == [logprob_of(token, index) for index, token in enumerate(second.token_ids)]
