"""One HTML file of a simulation, one of a sweep: pictures and tables in it, nothing loaded from anywhere, readable light and dark.

What stands in it from outside (names of scenarios, values, messages) is escaped; the page allows no script and no connection.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from headway.planning.pictures import MISSING, Picture
from headway.planning.scenario_file import scenario_text
from headway.planning.simulate_text import duration, percent
from headway.planning.sweep import Outcome, short_name
from headway.planning.sweep_table import sweep_cells
from headway.rules.waste import ROWS
from headway.sim.scenario import Scenario
from headway.sim.summary import Summary

_TEMPLATE = Path(__file__).with_name("page.html.jinja")


@dataclass(frozen=True)
class Table:
    """A table of the page. `named`: its first column holds names."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    named: bool = True
    note: str = ""


def simulation_page(name: str, scenario: Scenario, summary: Summary, pictures: Sequence[Picture], report: str) -> str:
    """Return the page of a simulation. `name`: what the scenario is called; `report`: as a terminal shows it."""
    tables = [_fates(summary), _waits(summary), _staleness(summary), _lengths(summary)]
    return _page(
        title=f"headway simulate: {name}",
        lines=[f"{summary.batches:,} batches in {duration(summary.seconds)} of virtual time, by {_by(summary)}."],
        tiles=_tiles(summary),
        problems=[] if pictures else [MISSING],
        pictures=pictures,
        tables=tables,
        texts=[("The report as text", report), ("The whole scenario", scenario_text(scenario))],
    )


def sweep_page(name: str, base: Scenario, outcomes: Sequence[Outcome], pictures: Sequence[Picture], points: int | None = None) -> str:
    """Return the page of a sweep. `base`: the scenario that the points vary; `points`: of the whole grid, where not all are done."""
    head, rows = sweep_cells(outcomes)
    keys = ", ".join(short_name(key) for key in outcomes[0].point.values)
    simulated = [outcome.summary for outcome in outcomes if outcome.summary]
    count = f"{len(outcomes):,} points" if points in {None, len(outcomes)} else f"{len(outcomes):,} of {points:,} points"
    by = f", by {_by(simulated[0])}" if simulated else ""
    return _page(
        title=f"headway simulate --sweep: {name}",
        lines=[f"{count} over {keys}{by}.", "All figures of all points: sweep.csv and sweep.parquet beside this page."],
        tiles=[],
        problems=[*([] if pictures or not simulated else [MISSING]), *(_problem(each) for each in outcomes if each.problem)],
        pictures=pictures,
        tables=[
            Table(
                "Points",
                head,
                rows,
                named=False,
                note="tokens/s: trained. trainer, engines: share of the time at work. heads: rollouts whose first token trains. "
                "mean, p99, max: staleness of trained tokens, in versions. in flight: rollouts, mean.",
            )
        ],
        texts=[("The scenario that the points vary", scenario_text(base))],
    )


def _page(
    *,
    title: str,
    lines: Sequence[str],
    tiles: Sequence[tuple[str, str]],
    problems: Sequence[str],
    pictures: Sequence[Picture],
    tables: Sequence[Table],
    texts: Sequence[tuple[str, str]],
) -> str:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=_plain(title),
        lines=lines,
        tiles=[{"figure": figure, "what": what} for figure, what in tiles],
        problems=[_plain(problem) for problem in problems],
        pictures=[
            {"title": each.title, "caption": each.caption, **{kind: b64encode(data).decode() for kind, data in each.png.items()}}
            for each in pictures
        ],
        tables=tables,
        texts=[{"title": heading, "text": _plain(text)} for heading, text in texts],
    )


def _plain(text: str) -> str:
    """Return text that can be written as UTF-8: names of files may hold bytes that are none."""
    return text.encode("utf-8", "backslashreplace").decode()


def _by(summary: Summary) -> str:
    return "headway's own components" if summary.by == "virtual loop" else summary.by


def _problem(outcome: Outcome) -> str:
    return f"{outcome.point.name}: {outcome.problem}"


def _tiles(summary: Summary) -> list[tuple[str, str]]:
    stale = summary.staleness
    return [
        (f"{summary.batches_per_hour:,.1f}", "batches an hour"),
        (f"{summary.trained_tokens_per_second:,.0f}", "trained tokens a second"),
        (percent(summary.trainer_busy), "of the time the trainer trains"),
        (percent(summary.engines_busy), "of the time engines generate"),
        (f"{stale.mean:.2f} / {stale.p99} / {stale.max}", "staleness: mean / p99 / max"),
        (percent(summary.masked_share), "of the tokens masked"),
        (percent(summary.head_coverage), "head coverage"),
        (f"{summary.in_flight_mean:,.0f}", "rollouts in flight, mean"),
    ]


def _fates(summary: Summary) -> Table:
    tokens = summary.tokens
    meanings = {**ROWS, "undelivered": "of attempts cut short or timed out"}
    fates: Mapping[str, int] = {"trained": tokens.trained, "masked": tokens.masked, **tokens.lost}
    rows = [
        (f"{fate.replace('_', ' ')}: {meanings.get(fate, '')}", f"{count:,}", percent(count / max(1, tokens.sampled)))
        for fate, count in fates.items()
    ]
    return Table("Where the tokens went", ("tokens", "count", "share"), [*rows, ("in all", f"{tokens.sampled:,}", "")])


def _waits(summary: Summary) -> Table:
    rows = [("trainer: training", percent(summary.trainer_busy))]
    rows += [(f"trainer: {why}", percent(share)) for why, share in summary.trainer_waits.items()]
    rows += [("engines: generating", percent(summary.engines_busy))]
    rows += [(f"engines: {why}", percent(share)) for why, share in summary.engines_wait.items()]
    rows += [(f"gate: closed by {why}", percent(share)) for why, share in summary.gate_closed.items()]
    return Table("Who worked, who waited", ("who, and why", "share of the time"), rows)


def _staleness(summary: Summary) -> Table:
    figures = summary.staleness
    total = max(1, sum(figures.histogram) + sum(figures.masked_histogram.values()))
    stalest = max([len(figures.histogram) - 1, *figures.masked_histogram], default=0)
    trained = dict(enumerate(figures.histogram))
    rows = []
    for staleness in range(stalest + 1):
        here, masked = trained.get(staleness, 0), figures.masked_histogram.get(staleness, 0)
        if here or masked:
            rows.append((f"{staleness}", f"{here:,}", f"{masked:,}", percent((here + masked) / total)))
    return Table("Tokens in batches by staleness", ("versions", "trained", "masked", "share"), rows, named=False)


def _lengths(summary: Summary) -> Table:
    bias = summary.length_bias
    rows = [
        (f"{tokens:,.0f}", percent(trained), percent(heads))
        for tokens, trained, heads in zip(bias.tokens, bias.trained_share, bias.head_coverage, strict=True)
    ]
    return Table(
        "Finished rollouts by length, a tenth each", ("mean tokens of one", "tokens trained on", "heads trained on"), rows, named=False
    )
