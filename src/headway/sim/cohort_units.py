"""The live units of the cohort stepper: starts, ends and tokens in arrays, and what can be told of them at an instant."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway.sim.distributions import Floats

ROUNDING = 1e-9  # of a second, and of a token
Ints: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]
NONE: Ints = np.empty(0, np.int64)


class Units:
    """What runs, waits for a slot, or has ended and is in no batch, in the order of admission, which is that of births.

    `starts` [units]: seconds on the generation clock, never falling; units that start later than now wait for a slot. `ends` [units]: when
    the last member ends. `tokens` [units, members]: whole numbers. `speed`: tokens a second of each member. Arrays are replaced, not
    written to: who keeps one has what was.
    """

    def __init__(self, members: int, speed: float) -> None:
        self.starts: Floats = np.empty(0)
        self.ends: Floats = np.empty(0)
        self.tokens: Floats = np.empty((0, members))
        self._members = members
        self._speed = speed

    def __len__(self) -> int:
        return len(self.starts)

    def add(self, starts: Floats, tokens: Floats, seconds: Floats) -> float:
        """Add units behind all others; return when the last of them ends. `seconds` [units]: of the longest member."""
        ends = starts + seconds
        self.starts = np.concatenate((self.starts, starts))
        self.ends = np.concatenate((self.ends, ends))
        self.tokens = np.concatenate((self.tokens, tokens))
        return float(ends.max())

    def keep(self, units: Ints) -> None:
        """Forget all others."""
        self.starts, self.ends, self.tokens = self.starts.take(units), self.ends.take(units), self.tokens.take(units, axis=0)

    def cut(self, count: int) -> None:
        """Keep so many of the first."""
        self.starts, self.ends, self.tokens = self.starts[:count], self.ends[:count], self.tokens[:count]

    def started(self, now: float) -> int:
        """Return how many have started."""
        starts = self.starts
        if not len(starts) or starts.item(-1) <= now + ROUNDING:
            return len(starts)
        return int(starts.searchsorted(now + ROUNDING, side="right"))

    def ended(self, now: float) -> Ints:
        """Return which have ended."""
        return (self.ends <= now + ROUNDING).nonzero()[0]

    def count_ended(self, by: float) -> int:
        """Return how many will have ended by then."""
        return int(np.count_nonzero(self.ends <= by + ROUNDING))

    def ends_of(self, count: int, first: int | None = None) -> float:
        """Return when so many of them (of the `first` ones) have ended; infinite: there are fewer."""
        ends = self.ends[:first].copy()
        if len(ends) < count:
            return math.inf
        ends.partition(count - 1)
        return ends.item(count - 1)

    def count_in_flight(self, now: float) -> int:
        """Return how many members have started and have not ended."""
        ends = self.ends if self._members == 1 else self._member_ends(slice(None))
        return int(np.count_nonzero(ends > now + ROUNDING)) - (len(ends) - self.started(now)) * self._members

    def in_flight(self, now: float) -> Floats:
        """Return when the members end that have started and have not ended."""
        started = self.started(now)
        ends = self.ends[:started] if self._members == 1 else self._member_ends(slice(started))
        return ends[ends > now + ROUNDING]

    def ended_members(self, now: float) -> Flags:
        """Say of each member whether it has ended: [units, members]."""
        return np.asarray(self._member_ends(slice(None)) <= now + ROUNDING)

    def seconds(self, now: float, units: Ints | slice = slice(None)) -> float:
        """Return how long the members of these units have been written on, added up."""
        return float(np.clip((now - self.starts[units])[:, np.newaxis], 0.0, self.tokens[units] / self._speed).sum())

    def written(self, now: float, units: Ints) -> Floats:
        """Return how many tokens each of these units has by now, all members together."""
        elapsed = np.maximum(0.0, now - self.starts[units])[:, np.newaxis]
        return np.asarray(np.minimum(self.tokens[units], np.floor(elapsed * self._speed + ROUNDING)).sum(axis=1))

    def finished(self, now: float, units: Ints) -> float:
        """Return the tokens of those members of these units that have ended, added up."""
        return float(self.tokens[units][self._member_ends(units) <= now + ROUNDING].sum())

    def older_than(self, since: float, ended: Ints) -> Ints:
        """Return those of the ended units, ascending, of which every token was written before `since`."""
        older = ended[: ended.searchsorted(self.starts.searchsorted(since))]  # those that were born before
        if not len(older):
            return NONE
        return np.asarray(older[self.ends.take(older) < since - ROUNDING + 1 / self._speed])

    def _member_ends(self, units: Ints | slice) -> Floats:
        return np.asarray(self.starts[units][:, np.newaxis] + self.tokens[units] / self._speed)
