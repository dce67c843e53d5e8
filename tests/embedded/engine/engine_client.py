"""An engine of headway's own, served over real HTTP, and a client that calls it and may have its generations stand still.

Needs torch: who imports it has asked for that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from headway.embedded.engine.process import running
from headway.embedded.engine.scheduler import Scheduler
from headway.embedded.engine.settings import EngineServerSettings
from headway.embedded.engine.thread import ModelThread

LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


@dataclass
class Client:
    """Calls one engine."""

    session: aiohttp.ClientSession
    url: str
    thread: ModelThread

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, (await response.json() if response.content_type == "application/json" else await response.text())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, (await response.json() if response.content_type == "application/json" else await response.text())

    async def generate(self, token_ids: list[int], request_id: str | None = None, **sampling: Any) -> dict[str, Any]:
        body = {"request_id": request_id, "token_ids": token_ids, "sampling_params": {"logprobs": 0} | sampling}
        status, answer = await self.post("/inference/v1/generate", body)
        assert status == 200, answer
        return answer["choices"][0]

    async def begun(self, *asks: Awaitable[dict[str, Any]]) -> list[asyncio.Future[dict[str, Any]]]:
        """Have generations under way: each that has a row has four tokens, and the model stands still until the next call to it.

        However late that comes, as in a step that takes long: otherwise a generation might be over before anything meets it.
        """
        await self.post("/pause?mode=keep")
        begun: list[asyncio.Future[dict[str, Any]]] = [asyncio.ensure_future(ask) for ask in asks]
        await self.until("num_requests_waiting", lambda waiting: waiting == len(begun))

        def stand(scheduler: Scheduler) -> None:
            scheduler.resume()
            for _ in range(3):  # the first one prefills, and decodes a token like any other
                assert not scheduler.step()
            inbox = self.thread._inbox
            inbox.put(inbox.get())

        self.thread.command(stand)
        return begun

    async def metric(self, name: str) -> float:
        _, text = await self.get("/metrics")
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))

    async def until(self, name: str, holds: Callable[[float], bool]) -> None:
        async with asyncio.timeout(120):
            while not holds(await self.metric(name)):
                pass


@contextlib.asynccontextmanager
async def engine_on(directory: Path, **settings: Any) -> AsyncIterator[Client]:
    chosen = EngineServerSettings(model=directory, device="cpu", threads=1, **{"label": "ab12cd-0"} | settings)
    async with running(chosen) as (url, thread), aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Client(session, url, thread)
