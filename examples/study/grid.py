"""The grids of the study: which runs there are, in an order in which any beginning is of use (seeds outermost)."""

from __future__ import annotations

from collections.abc import Sequence

from play import ARMS, Cell

STEPS = 60
BOUNDS, SHARES, RATES, SEEDS = (2, 8), (0.0, 0.25, 0.5, 0.9, 1.0), (1.0, 3.0), 5
SYNCHRONOUS_SEEDS = 2  # its learning is the same whatever the tool does, and what it is compared by is not in question
LAGS, LAG_RATES, LAG_SEEDS = (0, 1, 4, 8), (1.0, 3.0, 10.0), 3
LAG_ARMS = ("train+reinforce", "train+tis", "train+decoupled_ppo")


def deciding(arms: Sequence[str] = tuple(ARMS), *, seeds: int = SEEDS, steps: int = STEPS, shares: Sequence[float] = SHARES) -> list[Cell]:
    """Return the runs of the deciding study: arms x max_staleness x share of slow prompts x learning rate x seeds."""
    return [
        Cell(arm=arm, S=bound, share=share, rate=rate, seed=seed, steps=steps)
        for seed in range(seeds)
        for arm in arms
        if not ARMS[arm].synchronous or seed < SYNCHRONOUS_SEEDS
        for share in shares
        for bound in BOUNDS
        for rate in RATES
    ]


def collapse(arms: Sequence[str] = LAG_ARMS, *, seeds: int = LAG_SEEDS, steps: int = STEPS) -> list[Cell]:
    """Return the runs of the collapse study: every token exactly `lag` versions old, no tool is slow."""
    return [
        Cell(arm=arm, S=lag, share=0.0, rate=rate, seed=seed, steps=steps, lag=lag)
        for seed in range(seeds)
        for arm in arms
        for lag in LAGS
        for rate in LAG_RATES
    ]
