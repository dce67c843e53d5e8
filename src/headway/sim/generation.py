"""How an engine writes: what a turn asks of it, which versions it served along its own clock, and its one timer.

An engine that generates has a clock of its own, which stands still while weights are synced; the versions that were served are kept along
it, so that every token can be stamped with the weights that wrote it. Every token is counted when it is written, whatever becomes of it.

Who writes a turn waits on one future until the turn is over. When that is, is the engine's to know: it has one timer, for the next thing
that happens, so that a weight sync wakes nobody and costs the same however much is in flight.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Literal

Spans = list[tuple[int, int]]
"""Stamps of a turn, as (first token, version)."""

_ROUNDING = 1e-9  # of a token
State = Literal["generating", "environments", "idle", "paused"]
"""What an engine does. "environments": rollouts are there, and none of them generates."""


@dataclass(slots=True, eq=False)
class Writing:
    """A turn as an engine is asked for it: `tokens`, which at full speed take `seconds`; when `until` of these are over it is broken off.

    `context`: tokens before it, of which the engine has `cached` still. `start`: where it began, on the engine's clock. `ended_with`: how
    many tokens were written by its end, whole or not.
    """

    tokens: int
    seconds: float
    until: float
    context: int = 0
    cached: int = 0
    start: float = 0.0
    ended_with: int = 0


class Generation(ABC):
    """How an engine writes. `deaths`: when it dies, and when it is back, ascending."""

    def __init__(self, version: int, deaths: Collection[tuple[float, float]]) -> None:
        self.paused = False
        self._deaths = deaths
        self._since = [0.0]  # on the clock: _versions[i] is served from _since[i] on
        self._versions = [version]
        self._writings: dict[Writing, Any] = {}  # turns under way
        self._timer: asyncio.TimerHandle | None = None
        self._hosted = 0
        self._states: list[tuple[float, State]] = [(0.0, "idle")]
        self._sequences = 0
        self._noted_at = self._sequence_seconds = 0.0

    @property
    def version(self) -> int:
        """The version that is served now."""
        return self._versions[-1]

    @property
    def dies_at(self) -> float:
        """The virtual time at which the engine dies or died, as long as it is not back; infinite: never."""
        if not self._deaths:
            return inf
        now = asyncio.get_running_loop().time()
        return next((dies for dies, back in self._deaths if now < back), inf)

    @property
    def states(self) -> list[tuple[float, State]]:
        """Since when it did what."""
        return self._states

    @property
    def sequence_seconds(self) -> float:
        """How many sequences it had under way, summed over the time in which it was not paused."""
        return self._sequence_seconds + self._sequences * (asyncio.get_running_loop().time() - self._noted_at)

    @property
    def preemptions(self) -> int:
        """How often a sequence was put back for want of room."""
        return 0

    @property
    @abstractmethod
    def sampled(self) -> int:
        """Tokens written so far, those of turns under way included."""

    @abstractmethod
    def clock(self) -> float:
        """Return its own clock."""

    @abstractmethod
    def written(self, writing: Writing) -> int:
        """Return how many tokens of a turn under way are written."""

    @abstractmethod
    async def write(self, writing: Writing) -> Spans | None:
        """Write a turn, until it is broken off, and return its stamps; None: the engine died before."""

    @abstractmethod
    def pause(self) -> None:
        """Write nothing until `resume`."""

    @abstractmethod
    def resume(self) -> None:
        """Go on."""

    @abstractmethod
    def _advance(self, now: float) -> None:
        """Bring everything to this instant: turns that are over end."""

    @abstractmethod
    def _due(self) -> float:
        """Return the virtual time before which `_advance` will have nobody to tell; infinite: there is nobody to be told."""

    def serve(self, version: int) -> None:
        """Write with other weights from now on."""
        self._since.append(self.clock())
        self._versions.append(version)

    def hosts(self, more: int) -> None:
        """Hear that rollouts come (1) or go (-1)."""
        self._hosted += more
        if not self._writings:
            self._note(asyncio.get_running_loop().time())

    def stamps(self, start: float, length: float, tokens: int) -> Spans:
        """Return the version spans of tokens spread evenly over a stretch of the clock.

        Token i is written at `start + length * i / tokens`: by the weights served then.
        """
        first = bisect_right(self._since, start) - 1
        spans = [(0, self._versions[first])]
        for since, version in zip(self._since[first + 1 :], self._versions[first + 1 :], strict=True):
            token = ceil((since - start) * tokens / length - _ROUNDING) if length else tokens
            if token >= tokens:
                break
            if token == spans[-1][0]:
                spans.pop()
            spans.append((token, version))
        return spans

    def _plan(self) -> None:
        """Have a timer that fires when something is due; one that fires too early is no harm."""
        due = self._due()
        if due < inf and (self._timer is None or self._timer.when() > due):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(due, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._advance(asyncio.get_running_loop().time())
        self._plan()

    def _note(self, now: float) -> None:
        """Note what it does now; of an instant only the last."""
        running = len(self._writings)
        state: State = "paused" if self.paused else "generating" if running else "environments" if self._hosted else "idle"
        self._sequence_seconds += self._sequences * (now - self._noted_at)
        self._noted_at, self._sequences = now, 0 if self.paused else running
        states = self._states
        if states[-1][1] != state:
            if states[-1][0] == now:
                states.pop()
            if not states or states[-1][1] != state:
                states.append((now, state))
