"""How far ahead admission runs, where the run may choose, and what it advises where the user did.

STALENESS.md, knobs: A sets the mean, S cuts the tail. `A = E[L] / gamma + 1` keeps the trainer as busy as A = S does, with younger tokens:
`steps_ahead = "auto"` follows `ceil(2 (E[L] / gamma + 1)) / 2`, never above S (line 1 of the invariant needs A <= S), and slowly, because
gamma itself depends on A. E[L]: a group's mean latency. gamma: the mean cycle between versions. Both in seconds.
"""

from __future__ import annotations

import math

from headway.types import OnStale

STEP = 0.5
BATCHES_BETWEEN_CHANGES = 8
MOST_MASKED = 0.02  # share of sampled tokens in batches: masking is a guard for the tail, not a diet
LEAST_COVERAGE = 0.95
_COSTS: dict[OnStale, str] = {"mask": "slow rollouts may be masked", "wait": "the trainer may wait", "drop": "slow groups may be dropped"}


def steps_needed(latency_seconds: float, cycle_seconds: float) -> float:
    """Return E[L] / gamma + 1: how far ahead keeps the trainer busy, in batches."""
    return latency_seconds / cycle_seconds + 1


def next_steps_ahead(current: float, latency_seconds: float, cycle_seconds: float, max_staleness: int) -> float:
    """Return A for the next batches: at most .5 nearer to what is needed, rounded up to halves, and never above S.

    Unchanged while nothing has been measured (a latency or a cycle of 0).
    """
    if latency_seconds <= 0 or cycle_seconds <= 0:
        return min(current, float(max_staleness))
    wanted = min(math.ceil(2 * steps_needed(latency_seconds, cycle_seconds)) / 2, float(max_staleness))
    nearer = min(current + STEP, wanted) if wanted > current else max(current - STEP, wanted)
    return min(nearer, float(max_staleness))


def change_due(k: int, changed_at: int) -> bool:
    """Whether A may change before batch k, when it was changed (or set) last before batch `changed_at`."""
    return k - changed_at >= BATCHES_BETWEEN_CHANGES


def advice(
    *,
    on_stale: OnStale,
    max_staleness: int,
    latency_seconds: float,
    cycle_seconds: float,
    masked_share: float | None = None,
    head_coverage: float | None = None,
    timeout_seconds: float = 0.0,
) -> list[str]:
    """Return what to turn, one line each, with the figures that say so; empty: nothing.

    `masked_share`: masked of all sampled tokens in batches, 0..1; `head_coverage`: share of rollouts whose first sampled token contributes;
    None: not known. `timeout_seconds`: rollout.timeout_seconds, 0 for none.
    """
    lines = []
    measured = latency_seconds > 0 and cycle_seconds > 0
    if measured and on_stale != "train" and max_staleness < steps_needed(latency_seconds, cycle_seconds):
        needed = steps_needed(latency_seconds, cycle_seconds)
        lines.append(
            f"rollout.max_staleness is {max_staleness}; a group takes {latency_seconds:.4g} s, a batch {cycle_seconds:.4g} s: "
            f"{_COSTS[on_stale]} below {latency_seconds:.4g} / {cycle_seconds:.4g} + 1 = {needed:.2f}: "
            f"raise rollout.max_staleness to {math.ceil(needed)}, or rollout.groups_per_batch"
        )
    if masked_share is not None and masked_share > MOST_MASKED:
        lines.append(
            f"{masked_share:.1%} of the sampled tokens are masked (aim: below {MOST_MASKED:.0%}): they were paid for and do not train: "
            f"raise rollout.max_staleness (it is {max_staleness}) or rollout.groups_per_batch"
        )
    if head_coverage is not None and head_coverage < LEAST_COVERAGE:
        lines.append(
            f"the first token contributes in {head_coverage:.1%} of the rollouts (aim: above {LEAST_COVERAGE:.0%}): early decisions of "
            f"slow ones hardly train: raise rollout.max_staleness (it is {max_staleness}) or rollout.groups_per_batch, "
            'or set rollout.on_stale = "train" with a correcting trainer.loss'
        )
    bound_seconds = max_staleness * cycle_seconds
    if on_stale == "wait" and cycle_seconds > 0 and timeout_seconds > bound_seconds > 0:
        lines.append(
            f"rollout.timeout_seconds is {timeout_seconds:.4g}, above max_staleness x cycle = {max_staleness} x {cycle_seconds:.4g} s "
            f"= {bound_seconds:.4g} s: the trainer waits for a rollout up to {timeout_seconds - bound_seconds:.4g} s: "
            "lower rollout.timeout_seconds, or raise rollout.max_staleness"
        )
    return lines
