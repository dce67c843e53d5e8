"""How long something takes, as the curve x -> P(L > x) in cells: what the formulas of a plan are integrated over.

The mean over each cell is exact (from the distribution's own `excess`), so every integral of the curve itself is; products of curves are
exact but for what happens inside one cell, which is narrower than 1 % of the mean where most of the mass is. A curve is scaled and shifted
without asking the distribution again: latency = seconds per token x tokens + what comes on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from headway.errors import ConfigError
from headway.sim.distributions import Floats, Given

_FINE, _COARSE = 1200, 400  # cells up to _BODY means, and from there to the far end
_BODY = 8.0
_FAR = 1e5  # means; beyond it only `rest` is known


@dataclass(frozen=True, eq=False)
class Curve:
    """P(L > x): `edges` (n + 1, from 0, increasing), `above` (n, the mean over each cell), `rest` = E[(L - edges[-1])+]."""

    edges: Floats
    above: Floats
    rest: float

    @property
    def mean(self) -> float:
        """E[L]."""
        return float(self.above @ np.diff(self.edges)) + self.rest

    @property
    def half_square(self) -> float:
        """E[L^2] / 2; of a curve without a variance that of its part up to 10^5 means."""
        squares = self.edges**2
        return float(self.above @ np.diff(squares)) / 2 + self.rest * float(self.edges[-1])

    def at(self, x: Floats | float) -> Floats:
        """Return P(L > x), the mean of x's cell; 1 for x below 0."""
        x = np.asarray(x, np.float64)
        cell = np.searchsorted(self.edges, x, side="right") - 1
        inside = self.above[np.clip(cell, 0, len(self.above) - 1)]
        return np.where(cell < 0, 1.0, np.where(cell >= len(self.above), 0.0, inside))

    def excess(self, x: float) -> float:
        """Return E[(L - x)+], exactly at edges."""
        widths = np.diff(self.edges)
        shares = np.clip((self.edges[1:] - x) / widths, 0.0, 1.0)
        return float(self.above @ (widths * shares)) + self.rest + max(0.0, -x)

    def moved(self, scale: float, shift: float = 0.0) -> Curve:
        """Return the curve of `scale` L + `shift`; both at least 0."""
        if shift <= 0:
            return Curve(self.edges * scale, self.above, self.rest * scale)
        return Curve(np.concatenate(([0.0], self.edges * scale + shift)), np.concatenate(([1.0], self.above)), self.rest * scale)

    def largest_of(self, count: int) -> Curve:
        """Return the curve of the largest of `count` that are drawn one by one: 1 - (1 - P(L > x))^count."""
        if count == 1:
            return self
        return Curve(self.edges, 1.0 - (1.0 - self.above) ** count, self.rest * count)

    def solve(self, mean: float) -> float:
        """Return the x at which E[max(x, L)] = x + E[(L - x)+] is `mean`; 0 where E[L] is more already."""
        low, high = 0.0, mean
        if mean <= self.mean:
            return 0.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if middle + self.excess(middle) < mean else (low, middle)
        return high


@lru_cache(maxsize=64)
def curve_of(given: Given) -> Curve:
    """Return a distribution's curve. Raises ConfigError when it has no mean, or the mean 0."""
    mean = given.mean
    if not math.isfinite(mean):
        raise ConfigError("a plan needs a mean: the distribution of rollouts has none (some never end): give it a limit")
    if not mean > 0:
        raise ConfigError("a plan needs rollouts of some length: theirs is 0")
    end = min(given.largest, _FAR * mean)
    body = min(end, _BODY * mean)
    edges = np.linspace(0.0, body, _FINE + 1)
    if end > body:
        edges = np.concatenate((edges, np.geomspace(body, end, _COARSE + 1)[1:]))
    excess = np.array([given.excess(float(edge)) for edge in edges])
    above = np.clip(-np.diff(excess) / np.diff(edges), 0.0, 1.0)
    return Curve(edges, above, float(excess[-1]))
