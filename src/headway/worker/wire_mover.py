"""Whom an attempt in a worker process asks when its engine fails: the orchestrator, over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.types import EngineAddress


class WireMover:
    """The mover of one attempt (`protocols.Mover`): asks by `ask`, one question at a time."""

    def __init__(self, ask: Callable[[EngineAddress], None]) -> None:
        self._ask = ask
        self._answer: asyncio.Future[EngineAddress | None] | None = None
        self._give_up: Callable[[int], None] | None = None
        self._hung = -1

    async def __call__(self, failed: EngineAddress) -> EngineAddress | None:
        """Return the engine to go on at; None: the attempt stays."""
        self._answer = asyncio.get_running_loop().create_future()
        self._ask(failed)
        return await self._answer

    def when_it_hangs(self, give_up: Callable[[int], None]) -> None:
        """Call `give_up(n)` when the engine hangs at which the attempt is after `n` moves."""
        self._give_up = give_up
        if self._hung >= 0:  # it came before the attempt had begun
            give_up(self._hung)

    def moved(self, engine: EngineAddress | None) -> None:
        """Take the answer."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(engine)

    def hangs(self, moves: int) -> None:
        """Take the news that the engine hangs."""
        self._hung = moves
        if self._give_up is not None:
            self._give_up(moves)
