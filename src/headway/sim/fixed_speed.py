"""How an engine writes at a fixed speed: every turn takes its seconds, however many there are. Its clock is in seconds.

    clock = virtual time - time spent paused          a turn that begins at clock c is over at c + its seconds

So when a turn is over on the clock is known when it begins, and a pause moves nothing: ends lie in one heap along the clock.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Collection
from itertools import count
from math import inf

from headway.sim.generation import Generation, Spans, Writing

_INSTANT = 1e-9  # of a second: what rounding leaves of a stretch of time
_FEW_ENDS = 64  # below this, ends of turns that were given up are not worth sweeping

_End = tuple[float, int, asyncio.Future[bool]]
"""Where on the clock a turn is over, the how manieth it is, and who hears of it."""


class FixedSpeed(Generation):
    """Turns do not touch each other. An engine that dies, paused or not, ends all of them in that instant."""

    def __init__(self, version: int, deaths: Collection[tuple[float, float]] = ()) -> None:
        super().__init__(version, deaths)
        self._paused_since = self._paused_seconds = 0.0
        self._ends: list[_End] = []  # a heap; it keeps those that were given up until they are due, or the most
        self._numbers = count()
        self._sampled = 0  # of turns that have ended

    @property
    def sampled(self) -> int:
        """Tokens written so far, those of turns under way included."""
        clock = self.clock()
        return self._sampled + sum(_written(writing, clock) for writing in self._writings)

    def clock(self) -> float:
        """Return the clock, in seconds; however sums round, never before the version that is served."""
        return self._clock_at(asyncio.get_running_loop().time())

    def written(self, writing: Writing) -> int:
        """Return how many tokens of a turn under way are written: they are spread evenly over its seconds."""
        return _written(writing, self.clock())

    async def write(self, writing: Writing) -> Spans | None:
        """Take the turn's seconds on the clock."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now >= self.dies_at:
            return None
        writing.start = self._clock_at(now)
        self._writings[writing] = None
        self._note(now)
        end: asyncio.Future[bool] = loop.create_future()
        if writing.until > _INSTANT or self.paused:
            self._await_end(writing.start + writing.until, end)
        else:
            end.set_result(True)
        try:
            alive = await end
        finally:
            now = loop.time()
            del self._writings[writing]
            writing.ended_with = _written(writing, self._clock_at(now))
            self._sampled += writing.ended_with
            self._note(now)
        return self.stamps(writing.start, writing.seconds, writing.tokens) if alive else None

    def pause(self) -> None:
        """Write nothing until `resume`."""
        if not self.paused:
            now = asyncio.get_running_loop().time()
            self._end_by(now + _INSTANT / 2)  # what is over as the pause begins is over, however sums round
            self.paused, self._paused_since = True, now
            self._note(now)

    def resume(self) -> None:
        """Go on."""
        if self.paused:
            now = asyncio.get_running_loop().time()
            self._paused_seconds += now - self._paused_since
            self.paused = False
            self._plan()
            self._note(now)

    def _clock_at(self, now: float) -> float:
        return max((self._paused_since if self.paused else now) - self._paused_seconds, self._since[-1])

    def _await_end(self, at: float, end: asyncio.Future[bool]) -> None:
        """Have a turn end at this place on the clock."""
        if len(self._ends) > 2 * len(self._writings) + _FEW_ENDS:
            self._ends = [entry for entry in self._ends if not entry[2].done()]
            heapq.heapify(self._ends)
        heapq.heappush(self._ends, (at, next(self._numbers), end))
        if self._ends[0][2] is end:  # all others are planned for
            self._plan()

    def _advance(self, now: float) -> None:
        if now >= self.dies_at:
            over, self._ends = sorted(self._ends), []
            for _, _, end in over:
                _tell(end, alive=False)
        elif not self.paused:
            self._end_by(now)

    def _end_by(self, time: float) -> None:
        ends = self._ends
        while ends and ends[0][0] + self._paused_seconds <= time:
            _tell(heapq.heappop(ends)[2], alive=True)

    def _due(self) -> float:
        ends = self._ends
        while ends and ends[0][2].done():
            heapq.heappop(ends)
        if not ends:
            return inf
        return self.dies_at if self.paused else min(self.dies_at, ends[0][0] + self._paused_seconds)


def _written(writing: Writing, clock: float) -> int:
    elapsed = clock - writing.start
    return writing.tokens if elapsed >= writing.seconds - _INSTANT else int(writing.tokens * elapsed / writing.seconds)


def _tell(end: asyncio.Future[bool], *, alive: bool) -> None:
    if not end.done():  # whoever waited may have been cancelled
        end.set_result(alive)
