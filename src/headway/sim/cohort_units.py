"""The live units of the cohort stepper: their starts, ends and tokens in one table, and what can be told of them at an instant."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway.sim.distributions import Floats

ROUNDING = 1e-9  # of a second, and of a token
Ints: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]


class Units:
    """A column for each unit, in the order of admission, which is that of births.

    Rows of `table` are a unit's start and its end (of its last member) on the generation clock, then the tokens of each member. Units that
    start later than now wait for a slot. Times are seconds on that clock; `speed` is tokens a second of each member.
    """

    def __init__(self, members: int, speed: float) -> None:
        self.table: Floats = np.empty((2 + members, 0))
        self._members = members
        self._speed = speed

    def __len__(self) -> int:
        return int(self.table.shape[1])

    @property
    def starts(self) -> Floats:
        """When each starts; never falls."""
        starts: Floats = self.table[0]
        return starts

    @property
    def ends(self) -> Floats:
        """When its last member ends."""
        ends: Floats = self.table[1]
        return ends

    @property
    def tokens(self) -> Floats:
        """Tokens of each member: a row for each member."""
        return self.table[2:]

    def add(self, starts: Floats, tokens: Floats) -> float:
        """Add units behind all others; return when the last of them ends."""
        ends = starts + tokens.max(axis=0) / self._speed
        added = np.empty((len(self.table), len(starts)))
        added[0], added[1], added[2:] = starts, ends, tokens
        self.table = np.concatenate([self.table, added], axis=1)
        return float(ends.max())

    def keep(self, keep: Flags) -> None:
        """Forget all others."""
        self.table = self.table[:, keep]

    def in_flight(self, now: float) -> Floats:
        """Return when the members end that have started and have not ended."""
        started = int(np.searchsorted(self.starts, now + ROUNDING, side="right"))
        ends: Floats = self.ends[:started]
        if self._members > 1:
            ends = self.starts[:started] + self.tokens[:, :started] / self._speed
        return ends[ends > now + ROUNDING]

    def ended_members(self, now: float) -> Flags:
        """Say of each member whether it has ended."""
        return np.asarray(self.starts + self.tokens / self._speed <= now + ROUNDING)

    def seconds(self, now: float, units: Ints | slice = slice(None)) -> float:
        """Return how long the members of these units have been written on, added up."""
        return float(np.clip(now - self.starts[units], 0.0, self.tokens[:, units] / self._speed).sum())

    def written(self, now: float, units: Ints) -> Floats:
        """Return how many tokens each of these units has by now, all members together."""
        elapsed = np.maximum(0.0, now - self.starts[units])
        return np.asarray(np.minimum(self.tokens[:, units], np.floor(elapsed * self._speed + ROUNDING)).sum(axis=0))

    def finished(self, now: float, units: Ints) -> float:
        """Return the tokens of those members of these units that have ended, added up."""
        tokens = self.tokens[:, units]
        return float(tokens[self.starts[units] + tokens / self._speed <= now + ROUNDING].sum())

    def older_than(self, since: float, ended: Flags) -> Ints:
        """Return the ended units of which every token was written before `since`."""
        if not len(self) or float(self.ends.min()) - 1.0 / self._speed >= since:
            return np.empty(0, np.int64)
        units = np.flatnonzero(ended & (self.ends - 1.0 / self._speed < since))
        last = (self.starts[units] + (self.tokens[:, units] - 1) / self._speed).max(axis=0)
        return np.asarray(units[last < since - ROUNDING])
