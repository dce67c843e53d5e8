"""The engine over real HTTP: vLLM's paths, answers and errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytest.importorskip("torch")

from engine_client import LONG, Client, engine_on

from headway.embedded.engine.server import MAX_BODY_BYTES

pytestmark = pytest.mark.torch

CONTEXT = 512


async def test_an_answer_holds_ids_logprobs_and_spans_of_every_token(engine: Client):
    status, answer = await engine.post(
        "/inference/v1/generate",
        {"request_id": "r7", "token_ids": [1, 40], "sampling_params": {"max_tokens": 9, "seed": 3, "logprobs": 0, "ignore_eos": True}},
    )
    assert status == 200
    assert answer["request_id"] == "generate-tokens-r7"
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == 9
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] is None
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert all(entry["logprob"] < 0 for entry in choice["logprobs"]["content"])
    assert choice["weight_versions"] == [{"version": "ab12cd-0", "start": 0, "end": 9}]


async def test_logprobs_come_only_when_asked_for_and_unknown_keys_are_ignored(engine: Client):
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 2, "min_p": 0.1, "skip_special_tokens": False}, "cache_salt": "x"}
    status, answer = await engine.post("/inference/v1/generate", body)
    assert status == 200
    assert answer["choices"][0]["logprobs"] is None


async def test_end_of_sequence_and_stop_ids_end_a_generation_and_are_part_of_it(engine: Client):
    free = (await engine.generate([1, 30], seed=5, max_tokens=150, ignore_eos=True))["token_ids"]
    at_eos = await engine.generate([1, 30], seed=5, max_tokens=150)
    assert at_eos["token_ids"] == free[: free.index(2) + 1]
    assert (at_eos["finish_reason"], at_eos["stop_reason"]) == ("stop", None)
    stop_id = free[3]
    at_stop = await engine.generate([1, 30], seed=5, max_tokens=150, ignore_eos=True, stop_token_ids=[99, stop_id])
    assert at_stop["token_ids"] == free[: free.index(stop_id) + 1]
    assert (at_stop["finish_reason"], at_stop["stop_reason"]) == ("stop", stop_id)


async def test_max_tokens_is_clamped_to_the_context_and_fills_it_when_left_out(engine: Client):
    prompt = [1] * (CONTEXT - 20)
    assert len((await engine.generate(prompt, max_tokens=10_000, ignore_eos=True))["token_ids"]) == 20
    assert len((await engine.generate(prompt, ignore_eos=True))["token_ids"]) == 20


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"token_ids": [1] * CONTEXT}, "512 tokens and the context 512"),
        ({"token_ids": [1, 57]}, "token id 57 is outside the vocabulary"),
        ({"token_ids": [1, -1]}, "token id -1 is outside the vocabulary"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"token_ids": [1], "stream": True}, "stream"),
        ({"prompt": "text"}, "token_ids"),
    ],
)
async def test_a_request_that_cannot_be_served_is_400_and_says_why(engine: Client, body, says):
    status, answer = await engine.post("/inference/v1/generate", body)
    assert status == 400
    assert says in answer["error"]["message"]


async def test_numbers_beyond_the_machine_s_are_served_and_do_not_end_the_engine(engine: Client):
    huge: dict[str, Any] = {"top_k": 2**70, "seed": -(2**70), "stop_token_ids": [2**70, -1], "max_tokens": 2**70, "top_p": 1e-300}
    assert (await engine.generate([1] * (CONTEXT - 3), **huge))["finish_reason"] in {"length", "stop"}
    assert (await engine.get("/health"))[0] == 200


async def test_a_body_without_end_is_refused_and_the_engine_serves_on(engine: Client):
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // (1 << 20) + 1):
            yield b" " * (1 << 20)

    with contextlib.suppress(aiohttp.ClientConnectionError):  # the connection may be closed while we still write
        async with engine.session.post(engine.url + "/inference/v1/generate", data=endless()) as response:
            assert response.status == 413
    assert (await engine.get("/health"))[0] == 200


async def test_unknown_paths_and_models_are_404_in_json(engine: Client):
    status, answer = await engine.get("/v1/nothing")
    assert (status, answer["error"]["code"]) == (404, 404)
    status, answer = await engine.post("/inference/v1/generate", {"token_ids": [1], "model": "adapter-3"})
    assert status == 404
    assert "adapter-3" in answer["error"]["message"]


async def test_seeds_reproduce_a_generation_whatever_runs_beside_it(engine: Client):
    alone = await engine.generate([1, 9, 9], seed=11, max_tokens=50, ignore_eos=True)
    company = [engine.generate([1, *range(3, 3 + i)], seed=i, max_tokens=10 + i, ignore_eos=True, temperature=0.8) for i in range(40)]
    again, *_ = await asyncio.gather(engine.generate([1, 9, 9], seed=11, max_tokens=50, ignore_eos=True), *company)
    other = await engine.generate([1, 9, 9], seed=12, max_tokens=50, ignore_eos=True)
    assert again["token_ids"] == alone["token_ids"] != other["token_ids"]


async def test_top_k_and_top_p_cut_the_distribution_and_its_logprobs(engine: Client):
    greedy = await engine.generate([1, 9], temperature=0, max_tokens=5, ignore_eos=True)
    for cut in ({"top_k": 1}, {"top_p": 1e-6}):
        choice = await engine.generate([1, 9], seed=3, max_tokens=5, ignore_eos=True, **cut)
        assert choice == greedy
    free = await engine.generate([1, 9], seed=3, max_tokens=5, ignore_eos=True)
    half = await engine.generate([1, 9], seed=3, max_tokens=1, ignore_eos=True, top_p=0.5)
    assert half["logprobs"]["content"][0]["logprob"] > min(entry["logprob"] for entry in free["logprobs"]["content"])


async def test_greedy_answers_have_log_probability_zero(engine: Client):
    choice = await engine.generate([1, 9], temperature=0, max_tokens=5, ignore_eos=True)
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [0] * 5


async def test_abort_needs_the_prefix_and_answers_the_waiting_client_with_what_there_is(engine: Client):
    [waiting] = await engine.begun(engine.generate([1, 3], request_id="a1", **LONG))
    await engine.post("/pause?mode=keep")
    assert (await engine.post("/inference/v1/abort_requests", {"request_ids": ["a1", "generate-tokens-unknown"]}))[0] == 200
    assert await engine.metric("num_requests_running") == 1
    assert (await engine.post("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-a1"]}))[0] == 200
    choice = await waiting
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 4
    assert choice["weight_versions"] == [{"version": "ab12cd-0", "start": 0, "end": len(choice["token_ids"])}]
    assert await engine.metric("num_requests_running") == 0


async def test_a_client_that_disconnects_frees_its_row(engine: Client):
    [waiting] = await engine.begun(engine.generate([1, 3], **LONG))
    await engine.post("/pause?mode=keep")  # it can not end by itself
    assert await engine.metric("num_requests_running") == 1
    waiting.cancel()
    await engine.until("num_requests_running", lambda running: running == 0)


async def test_the_same_request_id_twice_at_once_is_refused(engine: Client):
    await engine.post("/pause?mode=keep")
    waiting = asyncio.ensure_future(engine.generate([1, 3], request_id="twin", max_tokens=1))
    await engine.until("num_requests_waiting", lambda number: number == 1)
    status, answer = await engine.post("/inference/v1/generate", {"request_id": "twin", "token_ids": [1]})
    assert status == 400
    assert "in flight already" in answer["error"]["message"]
    await engine.post("/resume")
    await waiting


async def test_models_names_the_model_and_its_context(tiny_qwen3: Path):
    async with engine_on(tiny_qwen3, max_context_tokens=100) as engine:
        _, answer = await engine.get("/v1/models")
        assert answer["data"][0]["id"] == tiny_qwen3.name
        assert answer["data"][0]["max_model_len"] == 100
        assert (await engine.post("/inference/v1/generate", {"token_ids": [1] * 100}))[0] == 400


async def test_a_dead_model_thread_is_503_and_tells_everyone_who_waits(engine: Client):
    await engine.post("/pause?mode=keep")
    waiting = asyncio.ensure_future(engine.post("/inference/v1/generate", {"token_ids": [1]}))
    await engine.until("num_requests_waiting", lambda number: number == 1)

    def break_down(_: object) -> None:
        raise RuntimeError("out of memory")

    engine.thread.command(break_down)
    assert "out of memory" in repr(await engine.thread.died)
    for status, answer in (await waiting, await engine.get("/health"), await engine.post("/inference/v1/generate", {"token_ids": [1]})):
        assert status == 503
        assert "out of memory" in answer["error"]["message"]


async def test_an_id_in_a_header_that_is_no_text_is_refused_before_anything_is_generated(engine: Client):
    host, _, port = engine.url.removeprefix("http://").partition(":")
    body = b'{"token_ids": [1], "sampling_params": {"max_tokens": 2}}'
    reader, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\xff\xfe\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    answer = await reader.readuntil(b"\r\n")
    writer.close()
    await writer.wait_closed()
    assert answer == b"HTTP/1.1 400 Bad Request\r\n"
    _, metrics = await engine.get("/metrics")
    assert 'vllm:generation_tokens_total{model_name="' in metrics
    assert all(line.endswith(" 0") for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total"))
