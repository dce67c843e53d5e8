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
    remaining = without(ledger.births, oldest_births(ledger.ready_births, n))
    return holds(remaining, ledger.next_batch + 1, limits, ledger.promised)
