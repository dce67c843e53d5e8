"""How many groups may start now, and why no more.

STALENESS.md, algorithm: `by_staleness = sum_{j=k..v+A} Bmin(j) - |run| - |rdy|`, `by_engine = floor((max_concurrent - rollouts in flight)
/ group_size)`, capacity their minimum and never negative. Line 1 of the invariant: at an admission (birth v) every live birth is <= v, so
only the deadline v + S could be overbooked, and with A <= S that is what `intake` limits.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from headway.rules.view import LedgerView

_ROUNDING = 1e-9  # 2.3 - 2 is less than .3 in floating point, and .3 of 10 groups are 3

CapacityReason = Literal["open", "staleness", "concurrency", "draining", "end of data", "not published", "paused"]


class GateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that bound admission. `steps_ahead` (A) may be fractional; no batch exists from `steps` on."""

    groups_per_batch: int
    group_size: int
    max_concurrent: int
    steps_ahead: float
    steps: int

    def smallest_batch(self, j: int) -> int:
        """Bmin(j): the fewest groups that batch j will take."""
        return self.groups_per_batch if j < self.steps else 0

    def intake(self, k: int, version: int) -> int:
        """Return sum of Bmin(j) for j = k..version + A.

        The partial quota of the last batch counts rounded down, and only if that batch is not before k.
        """
        whole = math.floor(self.steps_ahead)
        last = version + whole
        full = self.groups_per_batch * max(0, min(last, self.steps - 1) - k + 1)
        share = self.steps_ahead - whole
        partial = math.floor(share * self.smallest_batch(last + 1) + _ROUNDING) if last + 1 >= k else 0
        return full + partial


def capacity_by_staleness(ledger: LedgerView, limits: GateLimits) -> int:
    """Return how many groups may start before generation runs too far ahead of training; negative when publication has fallen behind."""
    return limits.intake(ledger.next_batch, ledger.version) - len(ledger.running) - len(ledger.ready)


def free_slots(ledger: LedgerView, limits: GateLimits, eval_in_flight: int) -> int:
    """Return how many rollouts the engines may take on: members are counted, not groups."""
    return limits.max_concurrent - ledger.rollouts_in_flight - eval_in_flight


def capacity(ledger: LedgerView, limits: GateLimits, eval_in_flight: int = 0) -> int:
    """Return how many groups may start now; never negative."""
    if ledger.draining or ledger.version < 0:
        return 0
    by_engine = free_slots(ledger, limits, eval_in_flight) // limits.group_size
    return max(0, min(capacity_by_staleness(ledger, limits), by_engine))


def capacity_reason(ledger: LedgerView, limits: GateLimits, eval_in_flight: int = 0) -> CapacityReason:
    """Say in a word or two why no group may start, or "open"."""
    if ledger.draining:
        return "draining"
    if ledger.version < 0:
        return "not published"
    if ledger.exhausted and not ledger.waiting_prompts:
        return "end of data"
    if capacity_by_staleness(ledger, limits) <= 0:
        return "staleness"
    if free_slots(ledger, limits, eval_in_flight) < limits.group_size:
        return "concurrency"
    return "open"
