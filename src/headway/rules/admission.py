"""How many groups may start now, and why no more.

STALENESS.md, algorithm: `by_staleness = sum_{j=k..v+A} Bmin(j) - |run| - |rdy|`, `by_engine = floor((max_concurrent - rollouts in flight)
/ group_size)`, capacity their minimum and never negative. Line 1 of the invariant: at an admission (birth v) every live birth is <= v, so
only the deadline v + S could be overbooked, and with A <= S that is what `intake` limits.

With `enforce = "ship"` engines are kept full until enough complete groups wait, or until whatever starts would be too old at its birth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from headway.rules.view import LedgerView
from headway.settings import RolloutSection, replayed_groups, smallest_batch
from headway.settings import steps_ahead as first_steps_ahead
from headway.types import Enforce, OnStale

_ROUNDING = 1e-9  # 2.3 - 2 is less than .3 in floating point, and .3 of 10 groups are 3

CapacityReason = Literal[
    "open", "staleness", "ready groups", "concurrency", "draining", "end of data", "not published", "paused", "disk", "replay's turn"
]


class GateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that bound admission and forming. `steps_ahead` (A) may be fractional; no batch exists from `steps` on.

    `groups_per_batch` is Bmin, the fewest groups of a batch. `batch_tokens` above 0: batches are sized by tokens, and that is their budget.
    `replayed_groups`: how many groups of a batch may be replayed or external. `max_ready_groups` (0: S + 1 batches) and `max_ready_bytes`
    (0: no limit) count only with `enforce = "ship"`.
    """

    groups_per_batch: int
    group_size: int
    max_concurrent: int
    steps_ahead: float
    steps: int
    max_staleness: int = 8
    on_stale: OnStale = "mask"
    enforce: Enforce = "admission"
    max_lead: int = 1
    batch_tokens: int = 0
    replayed_groups: int = 0
    max_ready_groups: int = 0
    max_ready_bytes: int = 0

    @property
    def keeps_deadlines(self) -> bool:
        """Whether H(k) is kept (`rules.deadlines`): with wait and drop, enforced at admission."""
        return self.enforce == "admission" and self.on_stale in {"wait", "drop"}

    def smallest_batch(self, j: int) -> int:
        """Bmin(j): the fewest groups that batch j will take, replayed ones included."""
        return self.groups_per_batch if j < self.steps else 0

    def live_until(self, first: int, last: int, promised: Mapping[int, int]) -> int:
        """Return the sum of Bmin(j) for j = first..last, over live groups only: `promised` places go to others. Empty sum: 0."""
        batches = (last if last < self.steps else self.steps - 1) - first + 1
        places = self.groups_per_batch * batches if batches > 0 else 0
        return places - sum(count for j, count in promised.items() if first <= j <= last) if promised else places


def limits_of(rollout: RolloutSection, steps: int) -> GateLimits:
    """Return the limits that a config sets."""
    return GateLimits(
        groups_per_batch=smallest_batch(rollout),
        group_size=rollout.group_size,
        max_concurrent=rollout.max_concurrent,
        steps_ahead=first_steps_ahead(rollout),
        steps=steps,
        max_staleness=rollout.max_staleness,
        on_stale=rollout.on_stale,
        enforce=rollout.enforce,
        max_lead=rollout.max_lead,
        batch_tokens=rollout.batch_tokens,
        replayed_groups=replayed_groups(rollout),
        max_ready_groups=rollout.max_ready_groups,
        max_ready_bytes=rollout.max_ready_bytes,
    )


def steps_ahead(ledger: LedgerView, limits: GateLimits) -> float:
    """Return A now: as "auto" has chosen it last, otherwise as configured. Never above S, on which line 1 of the invariant rests.

    A history may have chosen it under a larger max_staleness than the run has been taken up again with.
    """
    ahead = limits.steps_ahead if ledger.steps_ahead is None else ledger.steps_ahead
    return ahead if ahead <= limits.max_staleness else limits.max_staleness


def intake(ledger: LedgerView, limits: GateLimits) -> int:
    """Return how many live groups batches k..version + A will take at least."""
    return taken_until(limits, ledger.next_batch, ledger.version, steps_ahead(ledger, limits), ledger.promised)


def taken_until(limits: GateLimits, k: int, version: int, ahead: float, promised: Mapping[int, int]) -> int:
    """Return how many live groups batches k..version + `ahead` will take at least, less the places that are `promised` to others.

    The partial quota of the last batch counts rounded down, and only if that batch is not before k.
    """
    whole = math.floor(ahead)
    last = version + whole
    full = limits.live_until(k, last, promised)
    part = ahead - whole
    if not part or last + 1 < k:
        return full
    return full + math.floor(part * limits.live_until(last + 1, last + 1, promised) + _ROUNDING)


def capacity_by_staleness(ledger: LedgerView, limits: GateLimits) -> int:
    """Return how many groups may start before generation runs too far ahead of training; negative when publication has fallen behind."""
    live = len(ledger.running) + len(ledger.ready)
    if limits.enforce == "admission":
        return intake(ledger, limits) - live
    if _enough_ready(ledger, limits) or _born_too_old(ledger, limits):
        return 0
    return limits.live_until(ledger.next_batch, limits.steps, ledger.promised) - live


def over_resume_budget(ledger: LedgerView, limits: GateLimits) -> str:
    """Say how one more admission would break the bound on those before the first publication of a resumed run; "": it would not.

    The resume trap of STALENESS.md, as a second lock: `admissions - drops <= sum of Bmin(j) for j = k..v + S`, with the k and v of the
    resume; of batches formed since, what they have taken stands for Bmin (a batch sized by tokens may take more). `capacity` allows no
    more than that anyhow: this is counted apart from the live sets that it reads.
    """
    budget = ledger.resume_budget
    if budget is None or limits.enforce != "admission":
        return ""
    last = budget.version + limits.max_staleness
    most = budget.taken + limits.live_until(ledger.next_batch, last, {})
    if budget.admitted < most:
        return ""
    return (
        f"the run was taken up at version {budget.version} with batch {budget.k} next: {budget.admitted} groups were admitted since "
        f"(less those dropped), and batches to {last} have room for {most}"
    )


def _born_too_old(ledger: LedgerView, limits: GateLimits) -> bool:
    """Whether what starts now is too old for the next batch already: forming has run ahead of publication."""
    return limits.on_stale != "train" and ledger.version + limits.max_staleness < ledger.next_batch


def _enough_ready(ledger: LedgerView, limits: GateLimits) -> bool:
    """Whether complete groups fill their bound. Never before they fill a batch: that could then never be formed."""
    ready = len(ledger.ready)
    if ready < limits.smallest_batch(ledger.next_batch):
        return False
    most = limits.max_ready_groups or (limits.max_staleness + 1) * limits.groups_per_batch
    return ready >= most or 0 < limits.max_ready_bytes <= ledger.ready_size


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
        return "staleness" if limits.enforce == "admission" or _born_too_old(ledger, limits) else "ready groups"
    if free_slots(ledger, limits, eval_in_flight) < limits.group_size:
        return "concurrency"
    return "open"
