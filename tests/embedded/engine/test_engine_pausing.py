"""The engine is paused and resumed over HTTP: what runs meanwhile stands still, ends or is finished, and what arrives waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("torch")

from engine_client import LONG, Client, engine_on

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("clear_cache", ["true", "false"])
async def test_pause_keep_freezes_requests_holds_arrivals_and_resume_finishes_both(engine: Client, clear_cache):
    [live] = await engine.begun(engine.generate([1, 3], seed=1, **LONG))
    assert (await engine.post(f"/pause?mode=keep&clear_cache={clear_cache}"))[0] == 200
    assert await engine.get("/is_paused") == (200, {"is_paused": True})
    assert (await engine.get("/health"))[0] == 200
    frozen = await engine.metric("generation_tokens_total")
    late = asyncio.ensure_future(engine.generate([1, 4], seed=2, max_tokens=3, ignore_eos=True))
    await engine.until("num_requests_waiting", lambda waiting: waiting == 1)
    assert await engine.metric("generation_tokens_total") == frozen == 4
    await engine.post("/update_weight_version", {"new_version": "ab12cd-1"})
    await engine.post("/resume")
    assert await engine.get("/is_paused") == (200, {"is_paused": False})
    spans = (await live)["weight_versions"]
    assert [span["version"] for span in spans] == ["ab12cd-0", "ab12cd-1"]
    assert [spans[0]["start"], spans[0]["end"], spans[1]["end"]] == [0, spans[1]["start"], 400]
    assert spans[0]["end"] == frozen
    assert (await late)["weight_versions"] == [{"version": "ab12cd-1", "start": 0, "end": 3}]


async def test_pause_wait_returns_when_the_last_request_is_done_and_holds_arrivals(engine: Client):
    live = await engine.begun(*(engine.generate([1, 3 + i], max_tokens=60 + i, ignore_eos=True) for i in range(5)))
    pausing = asyncio.ensure_future(engine.post("/pause?mode=wait"))
    await engine.until("generation_tokens_total", lambda tokens: tokens > 5 * 4)  # it goes on: the pause has begun
    late = asyncio.ensure_future(engine.generate([1, 4], max_tokens=3, ignore_eos=True))
    assert (await pausing)[0] == 200
    assert await engine.metric("num_requests_running") == 0
    assert [len(choice["token_ids"]) for choice in await asyncio.gather(*live)] == [60, 61, 62, 63, 64]
    await engine.until("num_requests_waiting", lambda waiting: waiting == 1)
    assert not late.done()
    await engine.post("/resume")
    assert len((await late)["token_ids"]) == 3


async def test_pause_abort_ends_what_runs_and_holds_arrivals(tiny_qwen3: Path):
    async with engine_on(tiny_qwen3, max_sequences=2) as engine:
        live = await engine.begun(*(engine.generate([1, 3 + i], **LONG) for i in range(4)))
        assert (await engine.post("/pause"))[0] == 200
        choices = await asyncio.gather(*live)
        assert [choice["finish_reason"] for choice in choices] == ["abort"] * 4
        assert sorted(bool(choice["token_ids"]) for choice in choices) == [False, False, True, True]
        late = asyncio.ensure_future(engine.generate([1], max_tokens=3, ignore_eos=True))
        await engine.until("num_requests_waiting", lambda waiting: waiting == 1)
        await engine.post("/resume")
        assert (await late)["finish_reason"] == "length"


async def test_an_unknown_pause_mode_is_refused(engine: Client):
    status, answer = await engine.post("/pause?mode=sleep")
    assert status == 400
    assert "sleep" in answer["error"]["message"]
    assert await engine.get("/is_paused") == (200, {"is_paused": False})
