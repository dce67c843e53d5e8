"""The generating client at vLLM-speaking engines, against a real HTTP server."""

import asyncio
import math

import pytest
from held_ports import LOOPBACK, held_ports
from scripted_engine import Break, Hold, Reply, ScriptedEngine, Status, Tokens, logprob, replies

from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.generation import ContextExceeded, Generated, GenerationFailed
from headway.types import EngineAddress, SamplingParams

LABEL = "abc-3"


async def generate(engine: ScriptedEngine, client: EngineClient | None = None, *, max_tokens: int = 8, **more) -> Generated:
    own = client or EngineClient("abc", retries=2)
    try:
        return await own.generate(
            EngineAddress(engine.url), [5, 6], SamplingParams(temperature=0.7), seed=11, max_tokens=max_tokens, request_id="r", **more
        )
    finally:
        if client is None:
            await own.close()


async def failure(*script: Reply, **more) -> tuple[GenerationFailed, ScriptedEngine]:
    async with ScriptedEngine(replies(*script), label=LABEL) as engine:
        with pytest.raises(GenerationFailed) as caught:
            await generate(engine, **more)
        return caught.value, engine


async def test_ids_logprobs_spans_and_finish_come_back_as_the_engine_gave_them():
    spans = [("abc-3", 0, 2), ("abc-4", 2, 3)]
    async with ScriptedEngine(Tokens([7, 8, 2], spans=spans)) as engine:
        got = await generate(engine, stop_token_ids=[2])
    assert got == Generated([7, 8, 2], [logprob(0), logprob(1), logprob(2)], [(0, 3), (2, 4)], "stop")
    (request,) = engine.requests
    assert request["token_ids"] == [5, 6]
    assert request["sampling_params"] == {"max_tokens": 8, "temperature": 0.7, "seed": 11, "logprobs": 0, "stop_token_ids": [2]}


@pytest.mark.parametrize(
    ("reply", "cause", "retryable"),
    [
        (Tokens([1, 2], logprobs=[-1.0]), "length_mismatch", False),
        (Tokens([1, 2], logprobs=[-1.0, -1.0, -1.0]), "length_mismatch", False),
        (Tokens([1, 2], logprobs=[]), "length_mismatch", False),
        (Tokens([1, 2], without=("logprobs",)), "length_mismatch", False),
        (Tokens([]), "empty_completion", False),
        (Tokens([], finish="length"), "empty_completion", False),
        (Tokens([1, 2], logprobs=[-1.0, math.nan]), "engine_error", True),
        (Tokens([1, 2], logprobs=[-1.0, -math.inf]), "engine_error", True),
        (Tokens([1, 2], finish=None), "engine_error", True),
        (Tokens([1, 2], without=("finish_reason",)), "engine_error", True),
        (Tokens([1, 2], finish="error"), "engine_error", True),
        (Tokens([1] * 9), "engine_error", True),
        (Tokens([1, 2], spans=[("abc-3", 0, 1)]), "engine_error", True),
        (Tokens([1, 2], spans=[("abc-3", 0, 2), ("abc-4", 1, 2)]), "engine_error", True),
        (Tokens([1, 2], spans=[("abc-3", 1, 2)]), "engine_error", True),
        (Tokens([1, 2], spans=[("abc-3", 0, 3)]), "engine_error", True),
        (Tokens([1, 2], spans=[("other-3", 0, 2)]), "engine_error", True),
        (Tokens([1, 2], spans=[("default", 0, 2)]), "engine_error", True),
        (Status(200, "<html>"), "engine_error", True),
        (Status(200, '{"choices": []}'), "engine_error", True),
        (Status(500, "internal"), "engine_error", True),
        (Status(422, "unprocessable"), "engine_error", False),
        (Status(404, "<html>nothing</html>"), "engine_error", False),
    ],
)
async def test_an_unusable_answer_is_refused_by_its_cause_and_asked_for_once(reply, cause, retryable):
    error, engine = await failure(reply)
    assert (error.cause, error.retryable) == (cause, retryable)
    assert len(engine.requests) == 1


async def test_a_refusal_shows_the_start_of_the_body():
    error, _ = await failure(Status(422, "temperature must be\n  a number" + "x" * 5000))
    assert "422" in str(error)
    assert "temperature must be a number" in str(error)
    assert len(str(error)) < 400


async def test_F06_an_aborted_generation_goes_on_with_its_prefix_and_what_is_left_of_the_budget():
    script = replies(Tokens([10, 11], finish="abort"), Tokens([12], finish="abort", spans=[("abc-4", 0, 1)]), Tokens([13, 2]))
    async with ScriptedEngine(script, label="abc-3") as engine:
        got = await generate(engine)
    assert got.token_ids == [10, 11, 12, 13, 2]
    assert got.logprobs == [logprob(0), logprob(1), logprob(0), logprob(0), logprob(1)]
    assert got.spans == [(0, 3), (2, 4), (3, 3)]
    assert got.finish == "stop"
    assert [request["token_ids"] for request in engine.requests] == [[5, 6], [5, 6, 10, 11], [5, 6, 10, 11, 12]]
    assert [request["sampling_params"]["max_tokens"] for request in engine.requests] == [8, 6, 5]
    assert len({request["sampling_params"]["seed"] for request in engine.requests}) == 3
    assert len({request["request_id"] for request in engine.requests}) == 3


async def test_an_engine_that_names_no_versions_gets_the_one_it_served_before_the_request_as_a_stamp():
    nameless = Tokens([1, 2], without=("weight_versions",))
    client = EngineClient("abc", retries=2)
    async with ScriptedEngine(replies(nameless, nameless), label=LABEL) as engine:
        assert (await generate(engine, client)).spans == [(0, 3)]
        engine.label = "abc-4"
        assert (await generate(engine, client)).spans == [(0, 4)]
    await client.close()


@pytest.mark.parametrize("label", ["default", "other-3"])
async def test_only_where_no_version_can_be_known_is_an_answer_without_versions_refused(label):
    async with ScriptedEngine(replies(Tokens([1, 2], without=("weight_versions",))), label=label) as engine:
        with pytest.raises(GenerationFailed, match="not of this run"):
            await generate(engine)


async def test_neighbouring_parts_of_one_version_are_one_span():
    async with ScriptedEngine(replies(Tokens([1, 2], finish="abort"), Tokens([3])), label=LABEL) as engine:
        assert (await generate(engine)).spans == [(0, 3)]


async def test_F06_an_abort_at_the_end_of_the_budget_is_a_finished_generation():
    async with ScriptedEngine(Tokens([1, 2, 3], finish="abort"), label=LABEL) as engine:
        got = await generate(engine, max_tokens=3)
    assert (got.token_ids, got.finish, len(engine.requests)) == ([1, 2, 3], "length", 1)


async def test_F05_an_abort_without_tokens_is_tried_again_and_given_up_in_the_end():
    async with ScriptedEngine(replies(Tokens([], finish="abort"), Tokens([4])), label=LABEL) as engine:
        assert (await generate(engine)).token_ids == [4]
    client = EngineClient("abc", empty_aborts=2)
    error, engine = await failure(Tokens([1], finish="abort"), Tokens([], finish="abort"), client=client)
    await client.close()
    assert (error.cause, error.retryable, error.sampled_tokens) == ("engine_error", False, 1)
    assert len(engine.requests) == 3


async def test_a_busy_engine_is_asked_again_a_bounded_number_of_times_and_by_nobody_else():
    error, engine = await failure(Status(503, "busy"))
    assert len(engine.requests) == 3  # once, and twice more
    assert not error.retryable
    async with ScriptedEngine(replies(Status(429, headers={"Retry-After": "0.05"}), Status(503), Tokens([4])), label=LABEL) as engine:
        assert (await generate(engine)).token_ids == [4]


async def test_retry_after_is_waited_for():
    loop = asyncio.get_running_loop()
    async with ScriptedEngine(replies(Status(429, headers={"Retry-After": "0.4"}), Tokens([4])), label=LABEL) as engine:
        started = loop.time()
        await generate(engine)
        assert loop.time() - started >= 0.4


async def test_a_broken_connection_is_tried_again():
    async with ScriptedEngine(replies(Break(), Tokens([4])), label=LABEL) as engine:
        assert (await generate(engine)).token_ids == [4]
    error, engine = await failure(Break())
    assert len(engine.requests) == 3
    assert (error.cause, error.retryable) == ("engine_error", False)


async def test_an_engine_that_is_not_there_fails_in_bounded_time():
    engine = ScriptedEngine(Tokens([1]))
    with held_ports() as port:
        engine.url = f"http://{LOOPBACK}:{port}"  # where nobody listens
        with pytest.raises(GenerationFailed, match="cannot be reached") as caught:
            await generate(engine)
    assert not caught.value.retryable


@pytest.mark.parametrize(
    "body",
    [
        "This model's maximum context length is 1024 tokens. However, you requested 1030 tokens.",
        "The decoder prompt (length 2000) is longer than the maximum model length of 1024.",
        "the prompt has 512 tokens and the context 512: no room for an output token",
    ],
)
async def test_a_prompt_over_the_context_is_told_apart_and_not_tried_again(body):
    async with ScriptedEngine(Status(400, body)) as engine:
        with pytest.raises(ContextExceeded):
            await generate(engine)
    assert len(engine.requests) == 1


async def test_I08_proxies_of_the_environment_are_ignored(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with ScriptedEngine(Tokens([4]), label=LABEL) as engine:
        assert (await generate(engine)).token_ids == [4]


async def test_an_engine_at_an_ipv6_address_is_reached():
    async with ScriptedEngine(Tokens([4]), label=LABEL, host="::1") as engine:
        assert (await generate(engine)).token_ids == [4]


async def test_four_hundred_generations_run_at_once():
    release = asyncio.Event()
    client = EngineClient("abc")
    async with ScriptedEngine(Hold(release), label=LABEL) as engine, asyncio.TaskGroup() as tasks:
        for _ in range(400):
            tasks.create_task(generate(engine, client))
        await engine.until(lambda: engine.running == 400)
        release.set()
    await client.close()
    assert engine.peak == 400


async def test_connections_are_kept_and_used_again():
    client = EngineClient("abc")
    ports = set()

    async with ScriptedEngine(Tokens([4]), label=LABEL) as engine:
        answer = engine._answer

        async def noting_ports(http):
            ports.add(http.transport.get_extra_info("peername")[1])
            return await answer(http)

        engine._runner.server.request_handler = noting_ports
        for _ in range(20):
            await generate(engine, client)
    await client.close()
    assert len(ports) == 1


async def test_a_cancelled_generation_is_seen_by_the_engine():
    async with ScriptedEngine(Hold(asyncio.Event()), label=LABEL) as engine:
        task = asyncio.create_task(generate(engine))
        await engine.until(lambda: engine.running == 1)
        task.cancel()
        await engine.until(lambda: engine.gone == 1)
        with pytest.raises(asyncio.CancelledError):
            await task
