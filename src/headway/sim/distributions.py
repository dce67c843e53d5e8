"""How long things take, or how many tokens they have: frozen values that TOML can write, by their exact arithmetic.

    30.0 · {kind = "uniform", low = 10, high = 50} · {kind = "lognormal", mean = 30, sigma = 1} · {kind = "pareto", mean = 30, shape = 2}
    {kind = "mixture", parts = [[0.99, {kind = "fixed", value = 25}], [0.01, {kind = "fixed", value = 525}]]}
    {kind = "empirical", values = [21.5, 30.1, 28.9]}

One draw at a time by a key (`sample`: the virtual loop), many at once by a generator (`draw`: numpy, float64), and what plans are made of:
`mean`, `largest`, `above(x)` = P(L > x) and `excess(x)` = E[(L - x)+]. The unit is whatever the numbers are in: seconds, tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from functools import cached_property
from itertools import accumulate
from statistics import NormalDist
from typing import Annotated, Protocol, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from headway.sim.chance import Draws

_NORMAL = NormalDist()
_QUANTILE, _BELOW = _NORMAL.inv_cdf, _NORMAL.cdf
Floats: TypeAlias = NDArray[np.float64]
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]


class Distribution(Protocol):
    """What the virtual loop asks of one; `mean` may be infinite."""

    @property
    def mean(self) -> float:
        """The expectation."""
        ...

    def sample(self, draws: Draws) -> float:
        """Return one value."""
        ...


class _Given(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True, dict=True):
    """Base of those below."""


class Fixed(_Given, frozen=True, tag="fixed", dict=True):
    """Always the same. Infinite: never ends."""

    value: NotNegative

    @property
    def mean(self) -> float:
        """The expectation."""
        return self.value

    @property
    def largest(self) -> float:
        """The supremum of what can be drawn."""
        return self.value

    def sample(self, draws: Draws) -> float:
        """Return one value."""
        return self.value

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """Return `count` values."""
        return np.full(count, self.value)

    def above(self, x: float) -> float:
        """Return P(L > x)."""
        return float(self.value > x)

    def excess(self, x: float) -> float:
        """Return E[(L - x)+]."""
        return max(0.0, self.value - x)

    def scaled(self, factor: float) -> Fixed:
        """Return the distribution of `factor` L."""
        return Fixed(self.value * factor)


class Uniform(_Given, frozen=True, tag="uniform", dict=True):
    """Anything between two values, all alike."""

    low: NotNegative
    high: NotNegative

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise ValueError(f"uniform: high is {self.high:g}: it must be at least low, {self.low:g}")

    @property
    def mean(self) -> float:
        """The expectation."""
        return (self.low + self.high) / 2

    @property
    def largest(self) -> float:
        """The supremum of what can be drawn."""
        return self.high

    def sample(self, draws: Draws) -> float:
        """Return one value."""
        return self.low + (self.high - self.low) * draws.random()

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """Return `count` values."""
        return rng.uniform(self.low, self.high, count)

    def above(self, x: float) -> float:
        """Return P(L > x)."""
        if not self.low <= x < self.high:
            return float(x < self.low)
        return (self.high - x) / (self.high - self.low)

    def excess(self, x: float) -> float:
        """Return E[(L - x)+]."""
        if not self.low < x < self.high:
            return max(0.0, self.mean - x) if x <= self.low else 0.0
        return (self.high - x) ** 2 / (2 * (self.high - self.low))

    def scaled(self, factor: float) -> Uniform:
        """Return the distribution of `factor` L."""
        return Uniform(self.low * factor, self.high * factor)


class Lognormal(_Given, frozen=True, tag="lognormal", dict=True):
    """The usual shape of rollout lengths: logarithms are normal with standard deviation `sigma`."""

    mean: Positive
    sigma: Annotated[float, Meta(ge=0, le=10)]  # wider, and the mean lies in values that are never drawn

    @property
    def largest(self) -> float:
        """The supremum of what can be drawn."""
        return math.inf if self.sigma else self.mean

    def sample(self, draws: Draws) -> float:
        """Return one value."""
        return self._median * math.exp(self.sigma * _QUANTILE(draws.random()))

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """Return `count` values."""
        return self._median * np.exp(self.sigma * rng.standard_normal(count))

    def above(self, x: float) -> float:
        """Return P(L > x)."""
        if x <= 0 or not self.sigma:
            return float(x < self._median)
        return _BELOW(self._distance(x))

    def excess(self, x: float) -> float:
        """Return E[(L - x)+]: mean N(d + sigma) - x N(d), d = ln(median / x) / sigma."""
        if x <= 0 or not self.sigma:
            return max(0.0, self.mean - x)
        return max(0.0, self.mean * _BELOW(self._distance(x) + self.sigma) - x * _BELOW(self._distance(x)))

    def scaled(self, factor: float) -> Lognormal:
        """Return the distribution of `factor` L."""
        return Lognormal(self.mean * factor, self.sigma)

    def _distance(self, x: float) -> float:
        return math.log(self._median / x) / self.sigma

    @cached_property
    def _median(self) -> float:
        return self.mean * math.exp(-(self.sigma**2) / 2)


class Pareto(_Given, frozen=True, tag="pareto", dict=True):
    """A heavy tail: P(L > x) falls as x^-shape. The mean is finite for shapes above 1, the variance for shapes above 2."""

    mean: Positive
    shape: float

    def __post_init__(self) -> None:
        if not self.shape > 1:
            raise ValueError(f"pareto: shape is {self.shape:g}: it must be above 1, or the mean does not exist")

    @property
    def largest(self) -> float:
        """The supremum of what can be drawn."""
        return math.inf

    def sample(self, draws: Draws) -> float:
        """Return one value."""
        return self._least * float(draws.random() ** (-1 / self.shape))

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """Return `count` values."""
        return self._least * (1.0 - rng.random(count)) ** (-1 / self.shape)

    def above(self, x: float) -> float:
        """Return P(L > x)."""
        return 1.0 if x <= self._least else (self._least / x) ** self.shape

    def excess(self, x: float) -> float:
        """Return E[(L - x)+]."""
        return self.mean - x if x <= self._least else x * (self._least / x) ** self.shape / (self.shape - 1)

    def scaled(self, factor: float) -> Pareto:
        """Return the distribution of `factor` L."""
        return Pareto(self.mean * factor, self.shape)

    @property
    def _least(self) -> float:
        return self.mean * (self.shape - 1) / self.shape


class Empirical(_Given, frozen=True, tag="empirical", dict=True):
    """What was measured: one of these values, all alike."""

    values: Annotated[tuple[NotNegative, ...], Meta(min_length=1)]

    @property
    def mean(self) -> float:
        """The expectation."""
        return sum(self.values) / len(self.values)

    @property
    def largest(self) -> float:
        """The supremum of what can be drawn."""
        return self._sorted[-1]

    def sample(self, draws: Draws) -> float:
        """Return one value."""
        return self.values[int(draws.random() * len(self.values))]

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """Return `count` values."""
        return self._array[rng.integers(0, len(self.values), count)]

    def above(self, x: float) -> float:
        """Return P(L > x)."""
        return 1 - bisect_right(self._sorted, x) / len(self._sorted)

    def excess(self, x: float) -> float:
        """Return E[(L - x)+]."""
        return float(np.maximum(self._array - x, 0.0).mean())

    def scaled(self, factor: float) -> Empirical:
        """Return the distribution of `factor` L."""
        return Empirical(tuple(value * factor for value in self.values))

    @cached_property
    def _sorted(self) -> list[float]:
        return sorted(self.values)

    @cached_property
    def _array(self) -> Floats:
        return np.array(self.values, np.float64)


class Mixture(_Given, frozen=True, tag="mixture", dict=True):
    """One of several distributions, each with a weight; weights need not sum to 1."""

    parts: Annotated[tuple[tuple[Positive, Given], ...], Meta(min_length=1)]

    @property
    def mean(self) -> float:
        """The expectation."""
        return sum(weight * part.mean for weight, part in self.parts) / self._bounds[-1]

    @property
    def largest(self) -> float:
        """The supremum of what can be drawn."""
        return max(part.largest for _, part in self.parts)

    def sample(self, draws: Draws) -> float:
        """Return one value."""
        return self.parts[bisect_left(self._bounds, draws.random() * self._bounds[-1])][1].sample(draws)

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """Return `count` values."""
        which = np.searchsorted(self._bounds, rng.random(count) * self._bounds[-1], side="right").clip(max=len(self.parts) - 1)
        drawn = np.empty(count)
        for number, (_, part) in enumerate(self.parts):
            mine = which == number
            drawn[mine] = part.draw(rng, int(mine.sum()))
        return drawn

    def above(self, x: float) -> float:
        """Return P(L > x)."""
        return sum(weight * part.above(x) for weight, part in self.parts) / self._bounds[-1]

    def excess(self, x: float) -> float:
        """Return E[(L - x)+]."""
        return sum(weight * part.excess(x) for weight, part in self.parts) / self._bounds[-1]

    def scaled(self, factor: float) -> Mixture:
        """Return the distribution of `factor` L."""
        return Mixture(tuple((weight, part.scaled(factor)) for weight, part in self.parts))

    @cached_property
    def _bounds(self) -> tuple[float, ...]:
        return tuple(accumulate(weight for weight, _ in self.parts))


Given: TypeAlias = Fixed | Uniform | Lognormal | Pareto | Empirical | Mixture


def mixture(*parts: tuple[float, Given]) -> Mixture:
    """Return a mixture of (weight, distribution) pairs; raises ValueError for a weight that is not above 0, and for none."""
    if not parts or any(not weight > 0 for weight, _ in parts):
        raise ValueError("mixture: it needs parts, and every part a weight above 0")
    return Mixture(parts)


ONE_SECOND, NO_TIME = Fixed(1.0), Fixed(0.0)
