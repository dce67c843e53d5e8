"""What engines answer: read strictly, or refused by name. Nothing is padded, guessed at or waited for without end."""

import asyncio
import json
import math
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import NESTED, ended, hostile_json, is_one_short_line

from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.generation import Ask, ContextExceeded, GenerationFailed, Labels, Stamps, excerpt, is_context_error
from headway.adapters.engines.http import BadResponse, ConnectionFailed, HttpPool
from headway.adapters.engines.vllm.admin import VllmEngine
from headway.adapters.engines.vllm.wire import read_answer
from headway.errors import EngineFailed
from headway.settings import EngineSection
from headway.types import EngineAddress, SamplingParams

LABELS = Labels("run")
ASK = Ask("r", [1], max_tokens=8, temperature=1.0, top_p=1.0, top_k=0, seed=1)
ANSWER: dict[str, Any] = {
    "request_id": "r",
    "choices": [
        {
            "index": 0,
            "token_ids": [5, 6, 7],
            "finish_reason": "stop",
            "stop_reason": None,
            "logprobs": {"content": [{"token_id": n, "logprob": -0.5} for n in (5, 6, 7)]},
            "weight_versions": [{"version": "run-1", "start": 0, "end": 2}, {"version": "run-2", "start": 2, "end": 3}],
        }
    ],
}


def choice(**changes):
    return json.dumps({"choices": [ANSWER["choices"][0] | changes]}).encode()


def read(body, oldest=None):
    return read_answer(body, ASK, Stamps(LABELS, oldest))


@settings(max_examples=300, deadline=None)
@given(hostile_json(ANSWER), st.sampled_from([None, "run-0", "other-1", "default", "run-"]))
def test_any_answer_is_usable_or_refused_by_name(body, oldest):
    part = ended(read, body, oldest=oldest)
    if isinstance(part, GenerationFailed):
        assert is_one_short_line(part)
        return
    assert len(part.token_ids) == len(part.logprobs) <= 8
    np.array(part.token_ids, np.int32)
    assert all(token >= 0 for token in part.token_ids)
    assert all(math.isfinite(float(np.float32(value))) and value < 1 for value in part.logprobs)
    assert part.finish in {"stop", "length", "abort"}
    starts = [start for start, _ in part.spans]
    assert starts == sorted(set(starts))
    assert bool(part.spans) == bool(part.token_ids)
    assert starts[:1] == [0][: len(starts)]
    assert all(0 <= version < 2**31 for _, version in part.spans)


@pytest.mark.parametrize(
    "changes", [{"finish_reason": "[" * 5000}, {"weight_versions": [{"version": "run-1", "start": 1, "end": 9**4000}]}]
)
def test_a_refusal_of_something_very_long_is_a_short_line(changes):
    with pytest.raises(GenerationFailed) as refused:
        read(choice(**changes))
    assert is_one_short_line(refused.value)


@pytest.mark.parametrize("count", [0, 1, 2, 4, None])
def test_F03_fewer_or_more_logprobs_than_tokens_are_refused_and_never_padded(count):
    content = None if count is None else {"content": [{"logprob": -1.0}] * count}
    with pytest.raises(GenerationFailed, match="logprobs for 3 token ids") as refused:
        read(choice(logprobs=content))
    assert (refused.value.cause, refused.value.retryable, refused.value.sampled_tokens) == ("length_mismatch", False, 3)


@pytest.mark.parametrize("wrong", [None, "-0.5", True, 1e400, 7.0, -1e38 * 1e10, [], {}])
def test_F03_a_logprob_that_is_none_is_refused(wrong):
    body = choice(logprobs={"content": [{"logprob": -1.0}, {"logprob": wrong}, {"logprob": -1.0}]})
    with pytest.raises(GenerationFailed):
        read(body)


@pytest.mark.parametrize("finish", ["abort", None, "", "error", "STOP", 1, ["stop"]])
def test_F05_only_a_generation_that_says_how_it_ended_counts(finish):
    body = choice(finish_reason=finish)
    if finish == "abort":
        assert read(body).finish == "abort"
    else:
        with pytest.raises(GenerationFailed):
            read(body)
    missing = json.loads(body)
    del missing["choices"][0]["finish_reason"]
    with pytest.raises(GenerationFailed, match="finish_reason None"):
        read(json.dumps(missing).encode())


def test_H13_an_empty_answer_holds_nothing_and_one_token_is_kept():
    empty = read(choice(token_ids=[], logprobs={"content": []}, weight_versions=[]))
    assert (empty.token_ids, empty.spans) == ([], [])
    one = read(
        choice(token_ids=[2], logprobs={"content": [{"logprob": -0.1}]}, weight_versions=[{"version": "run-3", "start": 0, "end": 1}])
    )
    assert (one.token_ids, one.spans) == ([2], [(0, 3)])


@pytest.mark.parametrize("ids", [[-1, 2, 3], [2**31, 1, 1], [1.5, 1, 1], ["1", 1, 1], [True, 1, 1], [10**40, 1, 1]])
def test_ids_that_no_model_has_are_refused(ids):
    with pytest.raises(GenerationFailed, match="cannot be read"):
        read(choice(token_ids=ids))


@pytest.mark.parametrize(
    "label", ["run-01", "run--1", "run-+1", "run-1 ", "run-" + "9" * 5000, "run-9999999999", "Run-1", "run-1\n", "run-\u0661", ""]
)
def test_labels_that_are_not_written_as_this_run_writes_them_are_refused(label):
    with pytest.raises(GenerationFailed, match="not of this run") as refused:
        LABELS.version(label)
    assert len(str(refused.value)) < 300


def test_foreign_bodies_are_quoted_shortly():
    assert len(excerpt(b"\xff\x00\n" * 100_000)) < 300
    assert not is_context_error(b"a" * 10_000_000)


# --------------------------------------------------------------------------------------------------------------------- over the wire


@asynccontextmanager
async def engine(answer):
    """An engine at a URL that answers every request with what `answer(writer)` sends."""

    tasks = set()

    async def handle(reader, writer):
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            for task in tuple(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def whole(body, status="200 OK"):
    async def answer(writer):
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    return answer


async def _endless(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        await writer.drain()


async def _byte_by_byte(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"1\r\nx\r\n" * 1000)
        await writer.drain()


async def _claimed(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10737418240\r\n\r\n")
    await writer.drain()


async def _endless_headers(writer):
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X: y\r\n" * 1000)
        await writer.drain()


async def _endless_line(writer):
    writer.write(b"HTTP/1.1 200 ")
    while True:
        writer.write(b"O" * 65536)
        await writer.drain()


async def _bomb(writer):
    import gzip

    body = gzip.compress(b"0" * 50_000_000)
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()


@pytest.mark.parametrize("answer", [_endless, _byte_by_byte, _claimed, _endless_headers, _endless_line])
async def test_a_body_or_head_without_end_is_refused_at_its_limit(answer):
    pool = HttpPool()
    async with engine(answer) as url, asyncio.timeout(120):
        with pytest.raises(ConnectionFailed) as refused:
            await pool.request("GET", url, most=200_000)
    assert isinstance(refused.value, BadResponse)
    await pool.close()


async def test_what_is_compressed_is_not_unpacked():
    pool = HttpPool()
    async with engine(_bomb) as url:
        assert len((await pool.request("GET", url, most=200_000)).body) < 100_000
    await pool.close()


async def _never(writer):
    await asyncio.Event().wait()


async def _trickle(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("answer", [_never, _trickle])
async def test_an_administrative_call_that_is_not_answered_ends_at_its_limit(answer):
    async with engine(answer) as url, asyncio.timeout(120):
        admin = VllmEngine("engine-0", url, EngineSection(request_timeout_seconds=0.2), retries=1)
        with pytest.raises(EngineFailed, match=r"not answered within 0\.2 s"):
            await admin.label()
        with pytest.raises(EngineFailed, match="metrics cannot be read"):
            await admin.sampled_tokens()
    await admin.close()


ADMIN = [b"", b"\xff", b"{}", b"[]", b'{"weight_version": 3}', NESTED.encode(), b'{"weight_version": "\xff"}', b'{"weight_version": null}']


@pytest.mark.parametrize("body", ADMIN, ids=range(len(ADMIN)))
@pytest.mark.parametrize("status", ["200 OK", "500 No", "302 Found", "999 What"])
async def test_administrative_answers_are_read_or_refused_by_name(body, status):
    async with engine(whole(body, status)) as url, asyncio.timeout(120):
        admin = VllmEngine("engine-0", url, EngineSection(), retries=0)
        with pytest.raises(EngineFailed) as refused:
            await admin.label()
    assert "\n" not in str(refused.value)
    await admin.close()


METRICS = {
    b"vllm:generation_tokens_total 12\n": 12,
    b'vllm:generation_tokens_total{model_name="a"} 1.5e+01\nvllm:generation_tokens_total{model_name="b"} 3 1700000000\r\n': 18,
    b"vllm:generation_tokens_total 1..2\n": None,
    b"vllm:generation_tokens_total NaN\n": None,
    b"vllm:generation_tokens_total -4\n": None,
    b"vllm:generation_tokens_total 1e999\n": None,
    b"vllm:generation_tokens_total " + b"9" * 5000: None,
    b"vllm:generation_tokens_total{" + b"{" * 100_000: None,
    b"\xff\x00": None,
    b"": None,
}


@pytest.mark.parametrize("body", METRICS, ids=range(len(METRICS)))
async def test_counters_are_numbers_or_absent(body):
    async with engine(whole(body)) as url:
        admin = VllmEngine("engine-0", url, EngineSection())
        assert await admin.sampled_tokens() == METRICS[body]
    await admin.close()


async def test_any_answer_ends_a_generation_by_name_within_bounded_tries():
    bodies = _some_bodies()
    client = EngineClient("run", retries=1, empty_aborts=2)
    for body in bodies:
        async with engine(whole(body)) as url, asyncio.timeout(120):
            work = client.generate(EngineAddress(url), [1], SamplingParams(), seed=1, max_tokens=4, request_id="r")
            (generated,) = await asyncio.gather(work, return_exceptions=True)
            if isinstance(generated, (GenerationFailed, ContextExceeded)):
                assert is_one_short_line(generated)
            else:
                assert 0 < len(generated.token_ids) == len(generated.logprobs) <= 4
    await client.close()


def _some_bodies():
    yield choice(token_ids=[1], logprobs={"content": [{"logprob": -1}]}, weight_versions=[{"version": "run-1", "start": 0, "end": 1}])
    yield choice(token_ids=[], logprobs=None, weight_versions=[], finish_reason="abort")
    yield choice(token_ids=[], logprobs=None, weight_versions=[])
    yield choice(weight_versions=None)
    yield choice(weight_versions=[{"version": "run-1", "start": 0, "end": 2}])
    yield choice(weight_versions=[{"version": "run-1", "start": 0, "end": 10**30}])
    yield from (b"", b"null", b"{}", b'{"choices": []}', b'{"choices": [{}, {}]}', NESTED.encode(), b"\xff")
