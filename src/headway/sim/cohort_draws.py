"""What the cohort stepper is fed: draws in bulk, and the starts of units that wait for slots."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from headway.sim.distributions import Floats, Given

_BULK = 1 << 16  # draws at once


class Lengths:
    """Tokens of units to come, drawn in bulk; `least` of each member, one a turn."""

    def __init__(self, distribution: Given, members: int, speed: float, rng: np.random.Generator, *, least: int = 1) -> None:
        self._distribution = distribution
        self._members = members
        self._speed = speed
        self._rng = rng
        self._least = float(least)
        self._tokens, self._seconds = np.empty((0, members)), np.empty(0)
        self._at = 0

    def take(self, count: int) -> tuple[Floats, Floats]:
        """Return the tokens of the next units [units, members], and the seconds that the longest member of each takes [units]."""
        if self._at + count > len(self._seconds):
            self._draw(max(_BULK // self._members, count))
        self._at += count
        taken = slice(self._at - count, self._at)
        return self._tokens[taken], self._seconds[taken]

    def _draw(self, count: int) -> None:
        drawn = self._distribution.draw(self._rng, count * self._members)
        tokens = np.maximum(self._least, np.rint(drawn, out=drawn), out=drawn).reshape(count, self._members)
        seconds = tokens.max(axis=1) / self._speed
        self._tokens = np.concatenate((self._tokens[self._at :], tokens))
        self._seconds = np.concatenate((self._seconds[self._at :], seconds))
        self._at = 0


def queued_starts(running: Floats, seconds: Floats, now: float, most: int) -> Floats:
    """Return when units start that wait for slots, first come first served; a unit takes a slot for each member, all at once."""
    members = seconds.shape[1]
    ends = running.tolist()
    heapify(ends)
    free, starts, at = most - len(ends), [], now
    for unit in seconds.tolist():
        if members == 1 and not free:
            at = ends[0]
            heapreplace(ends, at + unit[0])  # out and in at once
            starts.append(at)
            continue
        while free < members:
            at = heappop(ends)
            free += 1
        free -= members
        starts.append(at)
        for member in unit:
            heappush(ends, at + member)
    return np.array(starts)


def training_times(seconds: Given, jitter: float, steps: int, rng: np.random.Generator) -> Floats:
    """Return what each batch takes the trainer: `jitter` is the standard deviation of the logarithm of a factor with mean 1."""
    times = seconds.draw(rng, steps)
    return times * np.exp(jitter * rng.standard_normal(steps) - jitter**2 / 2) if jitter else times
