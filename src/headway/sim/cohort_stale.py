"""What deadlines ask of the next batch, in vector steps: which units must be in it, and which may not be in its way (STALENESS: H)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headway.rules.admission import GateLimits
from headway.sim.cohort_units import NONE, ROUNDING, Ints, Units

Overbooked = list[tuple[int, int]]
"""How many of the live units, the first ones, are due by some batch d, and how many of them must go into the next batch."""


def overbooked(units: Units, limits: GateLimits, served_since: Callable[[int], float], k: int, version: int) -> Overbooked:
    """Return what is due by each d that needs some in batch k: what would be left beyond it is more than the batches up to d can take."""
    bound, found = limits.max_staleness, []
    for d in range(k, version + bound + 1):
        due = int(units.starts.searchsorted(served_since(d - bound + 1) - ROUNDING))  # born by version d - S
        needed = due - limits.live_until(k + 1, d, {})
        if needed > 0:
            found.append((due, needed))
    return found


def in_the_way(units: Units, now: float, needs: Overbooked, ended: Ints, chosen: Ints) -> Ints:
    """Return the fewest units that must go before the next batch may take the chosen ones: those that have written least."""
    gone, stays = np.zeros((2, len(units)), np.bool_)
    gone[chosen] = True
    stays[ended] = True
    cancelled: list[Ints] = []
    for due, needed in needs:
        excess = needed - int(gone[:due].sum())
        if excess > 0:
            free = np.flatnonzero(~gone[:due] & ~stays[:due])
            least = free[np.argsort(units.written(now, free), kind="stable")[:excess]]
            gone[least] = True
            cancelled.append(least)
    return np.concatenate(cancelled) if cancelled else NONE
