"""What a sweep came to as a table: on a terminal, as CSV and Parquet, as JSON. One row per point, the same every time.

Columns: the varied keys by their dotted paths, every scalar figure of `Summary` by its path with `_` between (`staleness_mean`), tokens
lost by any cause as `tokens_lost`, and `problem`: why a point has no figures ("": it has).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from headway.formats.files import strict_json
from headway.planning.simulate_text import percent
from headway.planning.sweep import Outcome, short_name, written
from headway.sim.summary import Staleness, Summary, Tokens

PROBLEM = "problem"
_NESTED: Mapping[str, type[msgspec.Struct]] = {"tokens": Tokens, "staleness": Staleness}
_TYPES = {"int": int, "float": float, "str": str}
_ARROW = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}


def figure_columns() -> dict[str, type]:
    """Return the columns of a summary's figures, each with its type, in the order of their definition."""
    columns: dict[str, type] = {}
    for name in Summary.__struct_fields__:
        if name in _NESTED:
            columns |= {f"{name}_{inner}": kind for inner, kind in _scalars(_NESTED[name])}
            columns |= {"tokens_lost": int} if name == "tokens" else {}
    scalars = dict(_scalars(Summary))
    ordered = {name: scalars[name] for name in Summary.__struct_fields__ if name in scalars}
    return ordered | columns


def figures(summary: Summary) -> dict[str, int | float | str]:
    """Return the scalar figures of a summary by their flat names."""
    found: dict[str, int | float | str] = {}
    for column in figure_columns():
        section, _, name = column.partition("_")
        if column == "tokens_lost":
            found[column] = sum(summary.tokens.lost.values())
        elif column in Summary.__struct_fields__:
            found[column] = getattr(summary, column)
        else:
            found[column] = getattr(getattr(summary, section), name)
    return found


def sweep_csv(outcomes: Sequence[Outcome]) -> bytes:
    """Return the table as CSV, in UTF-8."""
    text = io.StringIO()
    keys, columns = list(outcomes[0].point.values), list(figure_columns())
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*keys, *columns, PROBLEM])
    for outcome in outcomes:
        found = figures(outcome.summary) if outcome.summary else {}
        writer.writerow(
            [*(written(value) for value in outcome.point.values.values()), *(found.get(name, "") for name in columns), outcome.problem]
        )
    return text.getvalue().encode()


def sweep_parquet(outcomes: Sequence[Outcome]) -> bytes:
    """Return the table as Parquet; a key is a column of numbers where all of its values are numbers, of texts otherwise."""
    table: dict[str, Any] = {}
    for key in outcomes[0].point.values:
        table[key] = _key_column([outcome.point.values[key] for outcome in outcomes])
    rows = [figures(outcome.summary) if outcome.summary else {} for outcome in outcomes]
    for name, kind in figure_columns().items():
        table[name] = pa.array([row.get(name) for row in rows], _ARROW[kind])
    table[PROBLEM] = pa.array([outcome.problem for outcome in outcomes], pa.string())
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(table), sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def sweep_json(outcomes: Sequence[Outcome]) -> str:
    """Return what every point came to as JSON."""
    rows = [{"point": outcome.point.values, "summary": outcome.summary, "problem": outcome.problem} for outcome in outcomes]
    return strict_json(rows).decode().rstrip()


def sweep_cells(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table that people read: the varied keys, and the figures to choose by."""
    keys = [short_name(key) for key in outcomes[0].point.values]
    head = [*keys, "batches/h", "tokens/s", "trainer", "engines", "masked", "heads", "mean", "p99", "max", "in flight"]
    return head, [[*(written(value) for value in outcome.point.values.values()), *_cells(outcome.summary)] for outcome in outcomes]


def sweep_text(name: str, outcomes: Sequence[Outcome], points: int) -> str:
    """Return the table for a terminal, ASCII; `points`: of the whole grid."""
    head, rows = sweep_cells(outcomes)
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    whole = f"{points:,} points" if len(outcomes) == points else f"{len(outcomes):,} of {points:,} points"
    by = next((outcome.summary.by for outcome in outcomes if outcome.summary), "nothing was simulated")
    lines = [f"{name}: {whole} ({by})", "", *(_line(row, widths) for row in [head, *rows]), ""]
    lines.append("tokens/s: trained. trainer, engines: share of the time at work. heads: rollouts whose first")
    lines.append("token trains. mean, p99, max: staleness of trained tokens, versions. in flight: rollouts, mean")
    return "\n".join(lines).encode("ascii", "backslashreplace").decode()


def _scalars(struct: type[msgspec.Struct]) -> Iterator[tuple[str, type]]:
    for name, declared in struct.__annotations__.items():
        if declared in _TYPES:  # annotations are text here
            yield name, _TYPES[declared]


def _key_column(values: Sequence[Any]) -> Any:
    kinds = {type(value) for value in values}
    if kinds == {int, float}:
        return pa.array([float(value) for value in values], pa.float64())
    if len(kinds) == 1 and (kind := kinds.pop()) in _ARROW:
        return pa.array(values, _ARROW[kind])
    return pa.array([written(value) for value in values], pa.string())


def _cells(summary: Summary | None) -> list[str]:
    if summary is None:
        return ["-"] * 10
    stale = summary.staleness
    return [
        f"{summary.batches_per_hour:,.1f}",
        f"{summary.trained_tokens_per_second:,.0f}",
        percent(summary.trainer_busy),
        percent(summary.engines_busy),
        percent(summary.masked_share),
        percent(summary.head_coverage),
        f"{stale.mean:.2f}",
        f"{stale.p99}",
        f"{stale.max}",
        f"{summary.in_flight_mean:,.0f}",
    ]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
