"""What the cohort stepper is fed: draws in bulk, and the starts of units that wait for slots."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from headway.sim.distributions import Floats, Given

_BULK = 1 << 16  # draws at once


class Stream:
    """Values of a distribution, drawn in bulk."""

    def __init__(self, distribution: Given, rng: np.random.Generator) -> None:
        self._distribution = distribution
        self._rng = rng
        self._left = np.empty(0)
        self._at = 0

    def take(self, count: int) -> Floats:
        """Return the next values."""
        if self._at + count > len(self._left):
            self._left = np.concatenate([self._left[self._at :], self._distribution.draw(self._rng, max(_BULK, count))])
            self._at = 0
        self._at += count
        return self._left[self._at - count : self._at]


def queued_starts(running: Floats, seconds: Floats, now: float, most: int) -> Floats:
    """Return when units start that wait for slots, first come first served; a unit takes a slot for each member, all at once."""
    members = seconds.shape[1]
    ends = running.tolist()
    heapify(ends)
    free, starts, at = most - len(ends), np.empty(len(seconds)), now
    for number, unit in enumerate(seconds.tolist()):
        while free < members:
            at = heappop(ends)
            free += 1
        free -= members
        starts[number] = at
        for member in unit:
            heappush(ends, at + member)
    return starts


def training_times(seconds: Given, jitter: float, steps: int, rng: np.random.Generator) -> Floats:
    """Return what each batch takes the trainer: `jitter` is the standard deviation of the logarithm of a factor with mean 1."""
    times = seconds.draw(rng, steps)
    return times * np.exp(jitter * rng.standard_normal(steps) - jitter**2 / 2) if jitter else times
