"""Chance that belongs to what it happens to: numbers are a function of a key, not of the order in which they are asked for.

`Draws("seed", "prompt 7", member)` gives the same sequence in every schedule, process and Python version (BLAKE2b in counter mode).
Distributions are frozen values with `sample(draws)` and `mean`; durations are in seconds.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from statistics import NormalDist
from typing import Protocol

_UNPACK = struct.Struct("<8Q").unpack
_QUANTILE = NormalDist().inv_cdf


class Draws:
    """A sequence of uniform numbers in the open interval (0, 1), 52 bits each, fixed by a key."""

    __slots__ = ("_block", "_key", "_left")

    def __init__(self, *key: str | int) -> None:
        self._key = "\0".join(map(str, key)).encode()
        self._block = 0
        self._left: list[int] = []

    def random(self) -> float:
        """Return the next number; never 0 or 1, so that every quantile function takes it."""
        if not self._left:
            self._left.extend(_UNPACK(blake2b(self._key, salt=self._block.to_bytes(16, "little")).digest()))
            self._block += 1
        return ((self._left.pop() >> 12) + 0.5) * 2.0**-52


class Distribution(Protocol):
    """How long something takes, in seconds; `mean` may be infinite."""

    @property
    def mean(self) -> float:
        """The expectation, in seconds."""
        ...

    def sample(self, draws: Draws) -> float:
        """Return one duration."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same. Infinite: never ends."""

    seconds: float

    @property
    def mean(self) -> float:
        """The expectation, in seconds."""
        return self.seconds

    def sample(self, draws: Draws) -> float:
        """Return one duration."""
        return self.seconds


@dataclass(frozen=True, slots=True)
class Uniform:
    """Anything between two durations, all alike."""

    low: float
    high: float

    @property
    def mean(self) -> float:
        """The expectation, in seconds."""
        return (self.low + self.high) / 2

    def sample(self, draws: Draws) -> float:
        """Return one duration."""
        return self.low + (self.high - self.low) * draws.random()


@dataclass(frozen=True)
class Lognormal:
    """The usual shape of rollout lengths: log-durations are normal with standard deviation `sigma`."""

    mean: float
    sigma: float

    def sample(self, draws: Draws) -> float:
        """Return one duration."""
        return self._median * math.exp(self.sigma * _QUANTILE(draws.random()))

    @cached_property
    def _median(self) -> float:
        return self.mean * math.exp(-(self.sigma**2) / 2)


@dataclass(frozen=True, slots=True)
class Pareto:
    """A heavy tail: P(L > x) falls as x^-shape. The mean is finite for shapes above 1, the variance for shapes above 2."""

    mean: float
    shape: float

    def __post_init__(self) -> None:
        if self.shape <= 1:
            raise ValueError(f"Pareto: shape is {self.shape}: it must be above 1, or the mean does not exist")

    def sample(self, draws: Draws) -> float:
        """Return one duration."""
        return self.mean * (self.shape - 1) / self.shape * float(draws.random() ** (-1 / self.shape))


@dataclass(frozen=True)
class Mixture:
    """One of several distributions, with the given weights: `Mixture((0.99, Fixed(1.0)), (0.01, Fixed(20.0)))`."""

    parts: tuple[tuple[float, Distribution], ...]

    def __init__(self, *parts: tuple[float, Distribution]) -> None:
        if not parts or any(weight <= 0 for weight, _ in parts):
            raise ValueError("Mixture: every part needs a weight above 0")
        object.__setattr__(self, "parts", parts)

    @property
    def mean(self) -> float:
        """The expectation, in seconds."""
        return sum(weight * part.mean for weight, part in self.parts) / self._bounds[-1]

    def sample(self, draws: Draws) -> float:
        """Return one duration."""
        return self.parts[bisect_left(self._bounds, draws.random() * self._bounds[-1])][1].sample(draws)

    @cached_property
    def _bounds(self) -> tuple[float, ...]:
        return tuple(accumulate(weight for weight, _ in self.parts))


@dataclass(frozen=True, slots=True)
class Empirical:
    """What was measured: one of these durations, all alike."""

    seconds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The expectation, in seconds."""
        return sum(self.seconds) / len(self.seconds)

    def sample(self, draws: Draws) -> float:
        """Return one duration."""
        return self.seconds[int(draws.random() * len(self.seconds))]


ONE_SECOND, NO_TIME = Fixed(1.0), Fixed(0.0)
