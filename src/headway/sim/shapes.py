"""How long things take, by shapes that have a formula: frozen values with exact tails, each of one or two numbers.

Each draws one value by a key (`sample`: the virtual loop) or many by a generator (`draw`: numpy, float64), and knows `mean`, `largest`,
`above(x)` = P(L > x) and `excess(x)` = E[(L - x)+]. What is made of them, and of measured values: `sim.distributions`.
"""

from __future__ import annotations

import math
from functools import cached_property
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


class DistributionStruct(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True, dict=True):
    """Base of all distributions that TOML writes."""


class Fixed(DistributionStruct, frozen=True, tag="fixed", dict=True):
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


class Uniform(DistributionStruct, frozen=True, tag="uniform", dict=True):
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


class Lognormal(DistributionStruct, frozen=True, tag="lognormal", dict=True):
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


class Pareto(DistributionStruct, frozen=True, tag="pareto", dict=True):
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
