"""The bound on tokens, whatever happened before: line "mask" of STALENESS.md.

In batch k a token contributes iff `k - version <= max_staleness`. The predicate is itself the bound: it holds in any order of completion,
after any crash, with any counter wrong. With "wait" and "drop" groups are kept within the bound as wholes (`rules.deadlines`): nothing of
what they hold is masked, and the double lock looks at it as it is. Replayed and external rollouts are outside of the bound.
"""

from __future__ import annotations

from headway.types import OnStale, Rollout


def oldest_contributing(k: int, max_staleness: int) -> int:
    """Return the oldest version that may contribute to batch k."""
    return k - max_staleness


def can_contribute(rollout: Rollout, k: int, max_staleness: int, on_stale: OnStale) -> bool:
    """Whether any token of this rollout may contribute to batch k."""
    return on_stale != "mask" or rollout.source != "live" or rollout.tail >= oldest_contributing(k, max_staleness)
