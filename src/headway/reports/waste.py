"""Where every token went that the engines of a run sampled: `rules.waste` over its journal, held against the engines' own counts.

The engines are asked with every row of the pipeline. What was delivered by the last answer of each process cannot be more than they count;
what they count beyond that was sampled and not delivered.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import msgspec

from headway.events import Resumed
from headway.reports.run_files import RunFiles, sane
from headway.rules.waste import ROWS, waste

UNDELIVERED = "undelivered"
_NOT_DELIVERED = "cancelled, timed out, or being written now"


class WasteRow(msgspec.Struct, frozen=True):
    """One row: tokens, and their share of all that is in the table, 0..1."""

    row: str
    tokens: int
    share: float
    meaning: str


class WasteReport(msgspec.Struct, frozen=True):
    """`headway inspect RUN waste`.

    The rows add up to `sampled_tokens`. `engine_sampled_tokens`: the engines' own count, at the end of each process or at the last row of
    the pipeline; None: they do not say, and `undelivered` is missing. `delivered_since`: tokens delivered after that count.
    `sync_engine_seconds`: engines' time that weight syncs took. `problems`: where the books do not close; there should be none.
    """

    run: str
    ended: bool
    rows: list[WasteRow]
    failed_by_cause: dict[str, int]
    sampled_tokens: int
    delivered_tokens: int
    engine_sampled_tokens: int | None
    delivered_since: int
    sync_engine_seconds: float
    problems: list[str]


def waste_report(run: RunFiles) -> WasteReport:
    """Read the report; raises StorageError when a file is damaged or the journal contradicts itself."""
    with sane(run.directory.metrics_jsonl):
        fates = {int(row["batch"]): row["token_fates"] for row in run.batches() if "token_fates" in row}
    counted_at, counted = _engine_counts(run)
    with sane(run.state):
        found = waste(run.events(), fates, counted_at)
    tokens = {name: found.rows[name] for name in ROWS}
    problems = list(found.problems)
    if counted is not None:
        tokens[UNDELIVERED] = counted - found.delivered_by_count
        if tokens[UNDELIVERED] < 0:
            problems.append(f"the engines count {counted} sampled tokens, and {found.delivered_by_count} were delivered by then")
    total = sum(tokens.values())
    meanings: Mapping[str, str] = {**ROWS, UNDELIVERED: _NOT_DELIVERED}
    return WasteReport(
        run=run.name,
        ended=run.info.ended is not None,
        rows=[WasteRow(name, count, count / max(1, total), meanings[name]) for name, count in tokens.items()],
        failed_by_cause=dict(sorted(found.failed.items())),
        sampled_tokens=total,
        delivered_tokens=found.delivered,
        engine_sampled_tokens=counted,
        delivered_since=found.delivered - found.delivered_by_count if counted is not None else 0,
        sync_engine_seconds=found.sync_engine_seconds,
        problems=problems,
    )


def _engine_counts(run: RunFiles) -> tuple[list[float], int | None]:
    """Return when each process of the run asked its engines last, and what they counted in all; (.., None) when a process never knew."""
    begins = [float("-inf"), *(event.time for event in run.events() if isinstance(event, Resumed)), float("inf")]
    with sane(run.directory.pipeline_jsonl):
        counts = [(row["time"], row.get("engine_sampled_tokens")) for row in run.pipeline()]
    known = [(time, int(count)) for time, count in counts if count is not None]
    last = [
        max(((time, count) for time, count in known if begin <= time < end), default=(float("-inf"), None))
        for begin, end in pairwise(begins)
    ]
    total = None if any(count is None for _, count in last) else sum(count for _, count in last if count is not None)
    return [time for time, _ in last], total
