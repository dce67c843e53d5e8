"""What the study keeps of a run: one flat row of figures.

Rewards are expected ones: what the policy of a version earns on all prompts, computed exactly from its tables (`game.Tables`), and so free
of sampling noise and of the selection of who was trained. A run's mean reward is that of the versions that its batches train.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from play import GROUPS, MEMBERS, Played

from headway.events import GroupDropped

LAST = 10  # versions over which the end of a run is averaged
DIGITS_KEPT = 6


def row_of(played: Played) -> dict[str, Any]:
    """Return the row of a run; shares are None where there is nothing to take a share of."""
    cell, rows = played.cell, played.store.rows
    totals = sum(played.store.counts, Counter())
    trained = len(rows)
    versions = [played.weights.by_version[version] for version in range(trained + 1)]
    earned = sum(tables.value for tables in versions[:trained]) * GROUPS * MEMBERS
    masked, contributing = (sum(row[key] for row in rows) for key in ("masked_tokens", "contributing_tokens"))
    ess = [measured["ess"] for measured in played.measured if measured["ess"] is not None]
    row = {
        "arm": cell.arm,
        "S": cell.S,
        "share": cell.share,
        "rate": cell.rate,
        "seed": cell.seed,
        "steps": cell.steps,
        "lag": cell.lag,
        "trained": trained,
        "ended": played.ended,
        "reward_per_token": earned / played.sampled,
        "reward_per_second": earned / played.seconds,
        "final_reward": _mean([tables.value for tables in versions[-LAST:]]),
        "p_long": _mean([tables.p_long for tables in versions[-LAST:]]),
        "long_over_share": _share(totals["long over"], totals["long"]),
        "long_slow_share": _share(totals["slow"], totals["long"]),
        "long_lost_share": _share(played.asked - totals["long"], played.asked),
        "over_share": _share(totals["fork over"] + totals["plain over"], totals["fork"] + totals["plain"]),
        "head_coverage": _mean([row["head_coverage"] for row in rows]),
        "head_coverage_fork": _share(totals["fork credited"], totals["fork"]),
        "head_coverage_long": _share(totals["long credited"], totals["long"]),
        "ess_mean": _mean(ess),
        "ess_min": min(ess),
        "masked_share": masked / (masked + contributing),
        "stale_groups": sum(isinstance(event, GroupDropped) and event.cause == "stale" for event in played.events),
        "staleness_mean": sum(row["token_staleness_mean"] * row["contributing_tokens"] for row in rows) / contributing,
        "staleness_max": max(row["token_staleness_max"] for row in rows),
        "sampled_tokens": played.sampled,
        "seconds": played.seconds,
    }
    return {name: float(f"{value:.{DIGITS_KEPT}g}") if isinstance(value, float) else value for name, value in row.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
