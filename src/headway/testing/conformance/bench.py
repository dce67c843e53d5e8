"""What every check is given: the server, what may be done with it, and prompts that no other check has sent."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headway.testing.conformance.server import Answer, Server
from headway.testing.conformance.verdicts import Failed, Missed, Skipped

_LOOK_SECONDS = 0.02


class ConformanceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tokens`: length of generations that others are to meet in flight.

    `answer_seconds` bounds the first questions, `limit_seconds` each check, `call_seconds` one weight sync; within `freed_seconds` who left
    or was aborted holds no slot.

    Prompts are made of ids from `first_id` to `last_id`, which every vocabulary has.
    """

    tokens: int = 256
    concurrency: int = 64
    in_flight: int = 8
    first_id: int = 5
    last_id: int = 40
    answer_seconds: float = 30.0
    limit_seconds: float = 120.0
    call_seconds: float = 60.0
    freed_seconds: float = 5.0


@dataclass
class Bench:
    """One run of the suite. `label`: what the server served before it."""

    server: Server
    settings: ConformanceSettings
    model: Path | None = None
    other: Path | None = None
    adapter: Path | None = None
    label: str = ""
    touched: bool = False  # weights or label are not as they were found
    found: list[tuple[list[int], list[int]]] = field(default_factory=list)  # prompts, and how they were continued before the first sync
    check: str = ""
    run: str = field(default_factory=lambda: secrets.token_hex(4))

    def name(self, what: str = "") -> str:
        """Return the id of a request of this check."""
        return f"conformance-{self.check}-{self.run}-{what}-{secrets.token_hex(3)}"

    def prompt(self, length: int = 24) -> list[int]:
        """Return a prompt by chance: no other begins as it does, and nothing of it is cached."""
        low, size = self.settings.first_id, self.settings.last_id - self.settings.first_id + 1
        return [low + secrets.randbelow(size) for _ in range(length)]

    @asynccontextmanager
    async def in_flight(self, what: str, tokens: int) -> AsyncIterator[tuple[str, asyncio.Task[Answer]]]:
        """Have a generation of `tokens` tokens under way within the block: its id and its task. `Skipped` where it cannot be met.

        A server without metrics is believed to have begun after half a second.
        """
        others = await self.server.running() or 0
        async with self.asked(what, max_tokens=tokens, endless=True) as (name, task):
            await self.until_running(task, others)
            yield name, task

    @asynccontextmanager
    async def asked(self, what: str, **sampling: Any) -> AsyncIterator[tuple[str, asyncio.Task[Answer]]]:
        """Have a generation asked for within the block, and given up at its end: its id and its task. `sampling`: of `Server.generate`."""
        name = self.name(what)
        task = asyncio.create_task(self.server.generate(name, self.prompt(), **sampling))
        try:
            yield name, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until_running(self, task: asyncio.Task[Answer], others: int) -> None:
        """Wait until the server says that it runs something beside `others`. Raises `Skipped` where the generation is over before."""
        started = time.monotonic()
        while not task.done():
            running = await self.server.running()
            if (running or 0) > others or (running is None and time.monotonic() - started > 0.5):
                break
            await asyncio.sleep(_LOOK_SECONDS)
        if task.done():
            answer = task.result()  # what it failed with, if it did
            raise Missed(f"the generation was over before it could be met: {len(answer.ids)} tokens, {answer.finish}")

    async def until_idle(self, seconds: float) -> None:
        """Wait until the server says that nothing runs. Raises `Failed` when it does not within `seconds`."""
        ends = time.monotonic() + seconds
        while running := await self.server.running():
            if time.monotonic() > ends:
                raise Failed(f"{running} requests still ran {seconds:g} s later")
            await asyncio.sleep(_LOOK_SECONDS)

    async def long(self) -> int:
        """Return how many tokens a long generation may have here."""
        try:
            return min(self.settings.tokens, await self.server.context() - 32)
        except Skipped:
            return self.settings.tokens
