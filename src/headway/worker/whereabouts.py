"""Where an attempt is: the engine that it samples at, and how it gets to another one when that fails.

Turns that fail at the same time (an attempt may hold several conversations) ask once, and go on together; one that fails after others
have moved goes where they are. A turn that is cancelled while it asks leaves the question to the others: the attempt has moved, then.
"""

from __future__ import annotations

import asyncio

from headway.adapters.engines.in_flight import InFlight
from headway.protocols import Move, Mover
from headway.types import EngineAddress


class Whereabouts:
    """The engine of one attempt, `engine`, and the requests that are in flight there. `mover` None: it stays to its end."""

    def __init__(self, engine: EngineAddress, mover: Mover | None = None) -> None:
        self.engine = engine
        self.in_flight = InFlight()
        self._mover = mover
        self._moves = 0
        self._hung = -1  # after so many moves the engine hung
        self._asking: asyncio.Task[EngineAddress | None] | None = None
        if mover is not None:
            mover.when_it_hangs(self._hangs)

    def of_turn(self) -> Move | None:
        """Return how a turn that begins now gets elsewhere; None: it does not."""
        mover, seen = self._mover, self._moves
        if mover is None:
            return None

        async def move(failed: EngineAddress) -> EngineAddress | None:
            nonlocal seen
            if self._moves == seen:
                if self._asking is None:
                    self._asking = asyncio.create_task(self._ask(mover, failed), name="move")
                if await asyncio.shield(self._asking) is None:
                    return None
            seen = self._moves
            return self.engine

        return move

    def leave(self) -> None:
        """The attempt is over: whoever still asks is cancelled."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self, mover: Mover, failed: EngineAddress) -> EngineAddress | None:
        try:
            engine = await mover(failed)
        finally:
            self._asking = None
        if engine is not None:
            self.engine = engine
            self._moves += 1
            self.in_flight.renew()
            self._hangs(self._hung)
        return engine

    def _hangs(self, moves: int) -> None:
        self._hung = moves  # of an engine that the answer of a move has not brought it to yet, maybe
        if moves == self._moves:
            self.in_flight.give_up()
