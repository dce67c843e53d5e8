"""What the engines have sampled in all, by their own counters: the total that the books of a run are held against.

Counters count from an engine's start, and an engine may have served others before this run: `start` marks where they stand. One that has
fallen belongs to an engine that was started anew: what the old one sampled since it was asked last nobody knows, so from then on the total
is unknown. What was known before stays true.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headway.errors import HeadwayError
from headway.protocols import Engine

TIMEOUT_SECONDS = 2.0


class EngineCounts:
    """Adds up the engines' counters; an engine that cannot be asked makes the total unknown, and nothing worse."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._seen: list[int | None] = [None for _ in engines]
        self._sampled = [0 for _ in engines]

    async def start(self) -> None:
        """Count from here on. Call before anything is sampled."""
        self._seen = await self._ask()

    async def total(self) -> int | None:
        """Return how many tokens all engines have sampled since `start`; None when one of them does not say."""
        counts = await self._ask()
        for index, (count, seen) in enumerate(zip(counts, self._seen, strict=True)):
            if count is not None and seen is not None:
                self._sampled[index] += count - seen
                self._seen[index] = count if count >= seen else None
        return None if None in counts or None in self._seen else sum(self._sampled)

    async def _ask(self) -> list[int | None]:
        return list(await asyncio.gather(*map(_count, self._engines)))


async def _count(engine: Engine) -> int | None:
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await engine.sampled_tokens()
    except (HeadwayError, TimeoutError):
        return None
