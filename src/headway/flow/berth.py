"""A berth is where one attempt is served: its place at an engine of the pool, and how it gets another one while it goes on.

It answers the worker that runs the attempt (`protocols.Mover`). A move gives the place up and takes another, which waits while no engine
serves; whoever awaits the attempt bounds that by the rollout's deadline. An engine that hangs is told to the worker, which gives its
requests there up and asks for a move; a worker that does not listen has its attempt cancelled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from headway.flow.engine_pool import EnginePool, Place
from headway.types import EngineAddress


class Berth:
    """Where the attempt of the task that took `place` is served, from `place` on. `moves`: how often it got another, `most_moves` at most.

    `cancelled`: its engine hangs, and the task was cancelled for it.
    """

    __slots__ = ("_left", "_lost_since", "_most_moves", "_pool", "_task", "_told", "cancelled", "moves", "place")

    def __init__(self, pool: EnginePool, place: Place, *, lost_since: Callable[[Place], Awaitable[bool]], most_moves: int) -> None:
        self.place = place
        self.moves = 0
        self.cancelled = False
        self._pool = pool
        self._lost_since = lost_since
        self._most_moves = most_moves
        self._task = place.task
        self._told: Callable[[int], None] | None = None
        self._left = False
        place.give_up = self._give_up

    async def __call__(self, failed: EngineAddress) -> EngineAddress | None:
        """Return the engine to go on at; None: the one that failed is there, the attempt moved too often or is over, or may not."""
        if not self._may_move():
            return None
        if failed.url == self.place.url:
            if not await self._lost_since(self.place) or not self._may_move():
                return None
            place = await self._pool.acquire_instead(self.place)
            if place is None:
                return None
            if not self._may_move():  # the attempt is over, and what it left behind still asks
                self._pool.release(place)
                return None
            place.give_up = self._give_up
            self.place = place
        self.moves += 1
        return EngineAddress(self.place.url, self.place.kind)

    def when_it_hangs(self, give_up: Callable[[int], None]) -> None:
        """Call `give_up(moves)` instead of cancelling the attempt."""
        self._told = give_up
        if self.place.cut:
            give_up(self.moves)

    def leave(self) -> None:
        """Give the place back, for good."""
        self._left = True
        self._told = None
        self._pool.release(self.place)
        self.place.give_up = None  # the cycle of the two would be the garbage collector's, one for each attempt

    async def lost(self) -> bool:
        """Whether the engine was lost at which the attempt was last: looks at it now."""
        return await self._lost_since(self.place)

    def _may_move(self) -> bool:
        return not self._left and self.moves < self._most_moves

    def _give_up(self) -> None:
        if self._told is not None:
            self._told(self.moves)
        else:
            self.cancelled = True
            self._task.cancel()
