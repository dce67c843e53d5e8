"""How long things take, or how many tokens they have: frozen values that TOML can write, by their exact arithmetic.

    30.0 · {kind = "uniform", low = 10, high = 50} · {kind = "lognormal", mean = 30, sigma = 1} · {kind = "pareto", mean = 30, shape = 2}
    {kind = "mixture", parts = [[0.99, {kind = "fixed", value = 25}], [0.01, {kind = "fixed", value = 525}]]}
    {kind = "empirical", values = [21.5, 30.1, 28.9]}

The shapes are those of `sim.shapes`; here is what is made of values that were measured, and of several distributions. The unit is whatever
the numbers are in: seconds, tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cached_property
from itertools import accumulate
from typing import Annotated, TypeAlias

import numpy as np
from msgspec import Meta

from headway.sim.chance import Draws
from headway.sim.shapes import Distribution, DistributionStruct, Fixed, Floats, Lognormal, NotNegative, Pareto, Positive, Uniform

__all__ = [
    "NO_TIME",
    "ONE_SECOND",
    "Distribution",
    "Empirical",
    "Fixed",
    "Floats",
    "Given",
    "Lognormal",
    "Mixture",
    "Pareto",
    "Uniform",
    "mixture",
]


class Empirical(DistributionStruct, frozen=True, tag="empirical", dict=True):
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


class Mixture(DistributionStruct, frozen=True, tag="mixture", dict=True):
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
