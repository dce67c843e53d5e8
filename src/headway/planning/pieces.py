"""Distributions of what was measured, small enough for a file; and what the pieces are like whose sums were measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.sim.distributions import Empirical, Fixed, Floats, Given

MOST_VALUES = 400
_ALIKE = 1e-6
_SUMS = 20_000  # drawn in each round
_ROUNDS = 12


def empirical(values: Sequence[float] | Floats) -> Given:
    """Return what was measured as a distribution; of many values the means of 400 equal parts, so that the mean stays what it was."""
    ordered = np.sort(np.asarray(values, np.float64))
    if ordered[-1] - ordered[0] <= _ALIKE * max(abs(ordered[-1]), 1e-12):
        return Fixed(float(ordered.mean()))
    if len(ordered) > MOST_VALUES:
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        edges = np.linspace(0, len(ordered), MOST_VALUES + 1)  # parts may end within a value
        ordered = np.diff(np.interp(edges, np.arange(len(sums)), sums)) * MOST_VALUES / len(ordered)
    return Empirical(tuple(float(f"{value:.6g}") for value in ordered))


def pieces(sums: Floats, count: int) -> Floats:
    """Return values whose sums of `count`, drawn alike and independently, are distributed like `sums`, as nearly as there are such.

    Starts from sums / count, whose sums have the right mean and too little spread, and stretches each quantile by what it lacks.
    """
    wanted = np.quantile(sums, (np.arange(MOST_VALUES) + 0.5) / MOST_VALUES)
    wanted *= sums.mean() / max(wanted.mean(), 1e-12)
    found = wanted / count
    if count == 1:
        return found
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, MOST_VALUES, (_SUMS, count))
    for _ in range(_ROUNDS):
        now = np.quantile(found[drawn].sum(axis=1), (np.arange(MOST_VALUES) + 0.5) / MOST_VALUES)
        found = np.sort(np.maximum(found + (wanted - now) / count**0.5, 0.0))
        found *= wanted.mean() / count / max(found.mean(), 1e-12)
    return found
