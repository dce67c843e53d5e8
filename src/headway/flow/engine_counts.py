"""What the engines have sampled in all, by their own counters: the total that the books of a run are held against.

Counters count from an engine's start, and an engine may have served others before this run: `start` marks where they stand, and `joins`
where that of one stood that has joined. One that has fallen belongs to an engine that was started anew: what the old one sampled since it
was asked last nobody knows, so from then on the total is unknown. What was known before stays true.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from headway.errors import HeadwayError
from headway.protocols import Engine

TIMEOUT_SECONDS = 2.0  # a slow answer leaves one row without a total
FIRST_TIMEOUT_SECONDS = 10.0  # and here all rows


class EngineCounts:
    """Adds up the engines' counters; an engine that cannot be asked makes the total unknown, and nothing worse."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = {engine.name: engine for engine in engines}
        self._seen: dict[str, int | None] = dict.fromkeys(self._engines)  # by name; None: unknown for good
        self._sampled = 0
        self._complete = True  # all that have left have said what they sampled

    async def start(self) -> None:
        """Count from here on. Call before anything is sampled."""
        self._seen = await self._ask(self._engines, FIRST_TIMEOUT_SECONDS)

    async def stands(self, engine: Engine) -> int | None:
        """Return where the counter of an engine stands that is not counted yet; None: it does not say."""
        return await _count(engine, FIRST_TIMEOUT_SECONDS)

    def joins(self, engine: Engine, stood: int | None) -> None:
        """Count one more engine, from where its counter `stood` before anything was sampled there for this run."""
        self._engines[engine.name], self._seen[engine.name] = engine, stood

    async def leaves(self, engine: Engine) -> None:
        """Ask an engine for the last time, if it was counted."""
        if engine.name in self._engines:
            self._complete &= await self._add([engine.name])
            del self._engines[engine.name], self._seen[engine.name]

    async def total(self) -> int | None:
        """Return how many tokens all engines have sampled since `start`; None when one of them does not say."""
        complete = await self._add(list(self._engines))
        return self._sampled if complete and self._complete else None

    async def _add(self, names: Sequence[str]) -> bool:
        """Add what these engines have sampled since they were asked last; return whether that is all of it."""
        complete = True
        for name, count in (await self._ask(names)).items():
            seen = self._seen.get(name)
            if count is None or seen is None:
                complete = False
            elif count < seen:
                self._seen[name], complete = None, False
            else:
                self._sampled += count - seen
                self._seen[name] = count
        return complete

    async def _ask(self, names: Iterable[str], seconds: float = TIMEOUT_SECONDS) -> dict[str, int | None]:
        asked = list(names)
        counts = await asyncio.gather(*(_count(self._engines[name], seconds) for name in asked))
        return dict(zip(asked, counts, strict=True))


async def _count(engine: Engine, seconds: float) -> int | None:
    try:
        async with asyncio.timeout(seconds):
            return await engine.sampled_tokens()
    except (HeadwayError, TimeoutError):
        return None
