"""Admission by lifetime counters: the formula of the mission document, for its figures and for comparisons. Nothing else uses it.

    capacity = min(max_concurrent - running, (S + version + 1) B - (accepted + running))

It is the case A = S, Bmin = B, accepted = k B + |rdy| of `rules.admission`, and right only as long as that last equation holds: not after a
resume that forgets or keeps the wrong counter (STALENESS.md, "The resume trap"), and with uneven latencies its bound is none on what is
trained ("Figures that must come out again").
"""

from __future__ import annotations


def counter_capacity(*, max_concurrent: int, running: int, accepted: int, version: int, max_staleness: int, groups_per_batch: int) -> int:
    """Return how many groups the counters would admit; may be negative.

    `accepted` counts every group that has ever been completed, in a batch or not; `running` those in flight.
    """
    by_staleness = (max_staleness + version + 1) * groups_per_batch - (accepted + running)
    return min(max_concurrent - running, by_staleness)


def pending_limit(*, max_staleness: int, groups_per_batch: int) -> int:
    """Return the most groups that wait or run at once, counted so: (S + 1) B."""
    return (max_staleness + 1) * groups_per_batch
