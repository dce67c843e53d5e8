"""A simulated list of engines that join and leave: each is named in the spans of time that its settings say (`named`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from math import inf
from typing import Any, cast

from headway.protocols import Engine
from headway.sim.engine import SimEngine
from headway.types import EngineAddress


class SimRoster:
    """Who of these engines is named, now and whenever that changes; those that are named by nobody's clock are in no list."""

    def __init__(self, engines: Sequence[SimEngine]) -> None:
        self._engines = [engine for engine in engines if engine.named is not None]

    async def __aiter__(self) -> AsyncIterator[Sequence[EngineAddress]]:
        """Yield the addresses at once, and at each instant at which a span begins or ends."""
        loop = asyncio.get_running_loop()
        instants = {instant for engine in self._engines for span in engine.named or () for instant in span}
        for instant in sorted({loop.time()} | {instant for instant in instants if loop.time() < instant < inf}):
            await asyncio.sleep(instant - loop.time())
            yield [EngineAddress(engine.url) for engine in self._engines if _is_in(instant, engine.named or ())]
        await loop.create_future()

    def client(self, name: str, address: EngineAddress) -> Engine:
        """Return an engine under the name that the run gives it; the world knows it by another."""
        [engine] = [engine for engine in self._engines if engine.url == address.url]
        return cast("Engine", _Named(engine, name))


def _is_in(instant: float, spans: Sequence[tuple[float, float]]) -> bool:
    return any(begin <= instant < end for begin, end in spans)


class _Named:
    """An engine under another name."""

    def __init__(self, engine: SimEngine, name: str) -> None:
        self._engine = engine
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._engine, attribute)
