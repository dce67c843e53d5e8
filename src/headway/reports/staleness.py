"""How stale the tokens of a run were when they were trained on: over the run, and in its last batches.

Built from the rows of `metrics.jsonl`, whose histograms add up over batches; percentiles are those of the sums, nearest-rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headway.reports.run_files import RunFiles, sane
from headway.rules.coverage import Part, summed, tallies
from headway.types import OnStale

LAST_BATCHES = 8


class Distribution(msgspec.Struct, frozen=True):
    """Mean, percentiles and maximum of a staleness; null when nothing was counted."""

    mean: float | None
    p50: int | None
    p95: int | None
    p99: int | None
    max: int | None


class EnvironmentCoverage(msgspec.Struct, frozen=True):
    """Head coverage of an environment's rollouts, 0..1, and of each tenth of them by length, shortest first."""

    environment: str
    rollouts: int
    head_coverage: float
    by_length: list[float | None]


class Staleness(msgspec.Struct, frozen=True):
    """Figures over one batch or many. Tokens are those of live rollouts that are in the loss, or were masked as too old.

    `histogram` counts contributing tokens by staleness 0, 1, ...; `masked_histogram` masked ones, by staleness. Means are in versions,
    shares 0..1. `in_flight_share` and `queued_share` split `tokens.mean`.
    """

    contributing_tokens: int
    masked_tokens: int
    masked_share: float
    share_over_bound: float
    tokens: Distribution
    heads: Distribution
    in_flight_mean: float | None
    queued_mean: float | None
    in_flight_share: float | None
    queued_share: float | None
    histogram: list[int]
    masked_histogram: dict[int, int]
    head_coverage: float | None
    environments: list[EnvironmentCoverage]
    replayed_tokens: int


class BatchStaleness(msgspec.Struct, frozen=True):
    """The figures of one batch."""

    batch: int
    staleness: Staleness


class StalenessReport(msgspec.Struct, frozen=True):
    """`headway inspect RUN staleness`."""

    run: str
    ended: bool
    batches: int
    max_staleness: int
    on_stale: OnStale
    staleness: Staleness
    last_batches: list[BatchStaleness]


def staleness_report(run: RunFiles) -> StalenessReport:
    """Read the report; raises HeadwayError when no batch has been trained, StorageError when a file is damaged."""
    rows = run.trained_batches()
    bound = run.rollout.max_staleness
    with sane(run.directory.metrics_jsonl):
        return StalenessReport(
            run=run.name,
            ended=run.info.ended is not None,
            batches=len(rows),
            max_staleness=bound,
            on_stale=run.rollout.on_stale,
            staleness=_figures(rows, bound),
            last_batches=[BatchStaleness(row["batch"], _figures([row], bound)) for row in rows[-LAST_BATCHES:]],
        )


def _figures(rows: Sequence[Mapping[str, Any]], bound: int) -> Staleness:
    tokens = _added([row["token_staleness_histogram"] for row in rows])
    heads = _added([row["head_staleness_histogram"] for row in rows])
    masked: Counter[int] = Counter()
    for row in rows:
        masked.update({int(staleness): count for staleness, count in row["masked_staleness_histogram"].items()})
    contributing, out = sum(tokens), masked.total()
    in_flight, queued = _weighed(rows, "staleness_in_flight_mean"), _weighed(rows, "staleness_queued_mean")
    grown = (in_flight or 0.0) + (queued or 0.0)
    coverage = summed(tallies(row) for row in rows)
    everyone = {part: tally for part, tally in coverage.items() if part.tenth is None}
    rollouts = sum(tally.rollouts for tally in everyone.values())
    return Staleness(
        contributing_tokens=contributing,
        masked_tokens=out,
        masked_share=out / max(1, contributing + out),
        share_over_bound=sum(tokens[bound + 1 :]) / max(1, contributing),
        tokens=distribution(tokens),
        heads=distribution(heads),
        in_flight_mean=in_flight,
        queued_mean=queued,
        in_flight_share=in_flight / grown if in_flight is not None and grown else None,
        queued_share=queued / grown if queued is not None and grown else None,
        histogram=tokens,
        masked_histogram=dict(sorted(masked.items())),
        head_coverage=sum(tally.covered for tally in everyone.values()) / rollouts if rollouts else None,
        environments=[
            EnvironmentCoverage(
                part.environment,
                round(tally.rollouts),
                tally.share,
                [coverage[tenth].share if (tenth := Part(part.environment, number)) in coverage else None for number in range(10)],
            )
            for part, tally in sorted(everyone.items())
        ],
        replayed_tokens=sum(row["replayed_tokens"] for row in rows),
    )


def _added(histograms: Sequence[Sequence[int]]) -> list[int]:
    total = [0] * max(map(len, histograms), default=0)
    for histogram in histograms:
        for value, count in enumerate(histogram):
            total[value] += count
    return total


def _weighed(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Return the mean over contributing tokens of a figure that each row has as a mean."""
    known = [(row[key], sum(row["token_staleness_histogram"])) for row in rows if row[key] is not None]
    total = sum(weight for _, weight in known)
    return sum(mean * weight for mean, weight in known) / total if total else None


def distribution(counts: Sequence[int]) -> Distribution:
    """Return mean, nearest-rank percentiles and maximum of values 0, 1, ... that occur `counts` times."""
    total = sum(counts)
    if not total:
        return Distribution(None, None, None, None, None)

    def percentile(share: float) -> int:
        rank, below = math.ceil(share * total), 0
        for value, count in enumerate(counts):
            below += count
            if below >= rank:
                return value
        raise AssertionError(counts)

    mean = sum(value * count for value, count in enumerate(counts)) / total
    largest = max(value for value, count in enumerate(counts) if count)
    return Distribution(mean, percentile(0.5), percentile(0.95), percentile(0.99), largest)
