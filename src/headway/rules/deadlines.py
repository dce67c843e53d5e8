"""The invariant that keeps every live group within its deadline: what `on_stale = "wait"` and `"drop"` test before a batch is formed.

A group born at version b must be in batch b + S at the latest. STALENESS.md, invariant:

    H(k): for every d >= k - 1:  N(d) = |{live u: birth_u + S <= d}|  <=  sum_{j=k..d} Bmin(j)

a Hall condition: the batches up to d have room for every group that is due by d. Forming batch k of the groups X is safe exactly when
H(k + 1) holds for what remains (line 3), and taking the oldest births is the best choice by exchange. Both sides are step functions that
change at few places, so one test costs O(distinct births), at most S + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headway.rules.admission import GateLimits
from headway.rules.view import LedgerView

Births = Mapping[int, int]
"""Groups by birth."""


def holds(births: Births, k: int, limits: GateLimits, promised: Mapping[int, int]) -> bool:
    """Whether H(k) holds for live groups of these births."""
    return all(excess <= 0 for _, excess in overbooked(births, k, limits, promised))


def overbooked(births: Births, k: int, limits: GateLimits, promised: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Yield (birth b, N(d) minus the room up to d) for d = max(k - 1, b + S), births ascending: above 0 where H(k) is broken."""
    due = 0
    for birth in sorted(births):
        due += births[birth]
        last = max(k - 1, birth + limits.max_staleness)
        yield birth, due - limits.live_until(k, last, promised)


def oldest_births(ready: Births, n: int) -> dict[int, int]:
    """Return the births of the n oldest of these groups."""
    taken: dict[int, int] = {}
    for birth in sorted(ready):
        if n <= 0:
            break
        taken[birth] = min(n, ready[birth])
        n -= taken[birth]
    return taken


def without(births: Births, taken: Births) -> dict[int, int]:
    """Return the births that remain."""
    return {birth: count - taken.get(birth, 0) for birth, count in births.items() if count > taken.get(birth, 0)}


def holds_after(ledger: LedgerView, limits: GateLimits, n: int) -> bool:
    """Whether H(k + 1) holds once batch k has taken the n oldest ready groups."""
    births, ready, promised = ledger.births, ledger.ready_births, ledger.promised
    k, due = ledger.next_batch + 1, 0
    for birth in sorted(births):  # as `holds` of the births that remain, without making them: this is asked at every event
        count = births[birth]
        if n > 0 and (taken := min(n, ready.get(birth, 0))):
            n -= taken
            count -= taken
        due += count
        if count and due > limits.live_until(k, birth + limits.max_staleness, promised):
            return False
    return True


def last_tight(ledger: LedgerView, limits: GateLimits) -> int:
    """Return the last d at which H(k) holds with nothing to spare (k - 2: at none): only batches after it can spare a live group.

    Between two deadlines N(d) stands still and the room grows, so it is enough to look at the deadlines.
    """
    births, promised, bound, k = ledger.births, ledger.promised, limits.max_staleness, ledger.next_batch
    due = len(ledger.running) + len(ledger.ready)
    for birth in sorted(births, reverse=True):
        last = birth + bound
        if due >= limits.live_until(k, last, promised):
            return max(k - 1, last)
        due -= births[birth]
    return k - 2
