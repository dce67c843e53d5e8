"""The picture of a sweep: what throughput costs in staleness. Left the frontier of the means, right each point with its p99 and its max."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.planning.paper import MARKS, Axes, Figure, Palette, brief, figure_of, style, whole_numbers
from headway.planning.sweep import Outcome, short_name, written
from headway.sim.summary import Summary

MOST_ROWS = 48
_WIDTH = 9.6  # inches
_NEAR, _LETTER = 0.03, 0.01  # of the axes: two labels closer than that, and so much for each letter, lie on each other
_MOST_NAMED = 12  # series in the legend


@dataclass(frozen=True)
class _Dot:
    """A point that has figures. `series`: its values but for the key that runs along a line, `along`: that key's value."""

    series: str
    along: str
    summary: Summary
    bound: int | None


def line_key(values: Sequence[Mapping[str, Any]]) -> str:
    """Return the key that runs along the lines: the one with the most values, the first of them."""
    counts = {key: len({written(each[key]) for each in values}) for key in values[0]}
    return max(counts, key=lambda key: counts[key])


def draw_frontier(outcomes: Sequence[Outcome], palette: Palette) -> Figure:
    """Draw the points that have figures: trained tokens a second against staleness."""
    along = line_key([outcome.point.values for outcome in outcomes])
    dots = [_dot(outcome, along, outcome.summary) for outcome in outcomes if outcome.summary is not None]
    names = list(dict.fromkeys(dot.series for dot in dots))
    looks = {
        name: (palette.series[number % len(palette.series)], MARKS[(number + number // len(palette.series)) % len(MARKS)])
        for number, name in enumerate(names)
    }
    rows = min(len(dots), MOST_ROWS)
    figure = figure_of(palette, _WIDTH, max(4.2, 1.5 + 0.2 * rows))
    left, right = figure.subplots(1, 2, width_ratios=(5, 4))
    _draw_means(left, dots, looks, along, palette)
    _draw_whiskers(right, sorted(dots, key=lambda dot: names.index(dot.series))[:rows], looks, palette)
    first = f", the first {rows} of {len(dots)} points" if rows < len(dots) else ""
    right.set_title(f"{short_name(along)}{first}", loc="left", fontsize=9)
    if names != [""]:
        handles, labels = left.get_legend_handles_labels()
        more = [*labels[: _MOST_NAMED - 1], f"and {len(labels) - _MOST_NAMED + 1} more"] if len(labels) > _MOST_NAMED else labels
        columns = max(1, min(4, int(_WIDTH / (0.7 + 0.085 * max(map(len, more))))))
        figure.legend(handles[: len(more)], more, loc="outside upper left", ncols=columns, frameon=False, fontsize=9)
    return figure


def _dot(outcome: Outcome, along: str, summary: Summary) -> _Dot:
    others = " ".join(f"{short_name(key)}={brief(value)}" for key, value in outcome.point.values.items() if key != along)
    scenario = outcome.point.scenario
    bounded = scenario is not None and scenario.rollout.on_stale != "train"
    bound = scenario.rollout.max_staleness if scenario is not None and bounded else None
    return _Dot(others, brief(outcome.point.values[along]), summary, bound)


def _draw_means(axes: Axes, dots: Sequence[_Dot], looks: Mapping[str, tuple[str, str]], along: str, palette: Palette) -> None:
    for name, (colour, mark) in looks.items():
        mine = [dot for dot in dots if dot.series == name]
        x = [dot.summary.staleness.mean for dot in mine]
        y = [dot.summary.trained_tokens_per_second for dot in mine]
        axes.plot(x, y, color=colour, marker=mark, markersize=7, linewidth=1.2, markeredgecolor=palette.paper, label=name)
    means = [dot.summary.staleness.mean for dot in dots]
    room = max(0.12 * (max(means) - min(means)), 0.1)
    axes.set_xlim(max(-room / 4, min(means) - room), max(means) + room)
    axes.set_ylim(0, 1.12 * max(1e-9, *(dot.summary.trained_tokens_per_second for dot in dots)))
    axes.set_xlabel(f"mean staleness of trained tokens (versions)\nat each mark: {short_name(along)}")
    axes.set_ylabel("trained tokens a second")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    style(axes, palette)
    placed: list[tuple[float, float]] = []
    left, right = axes.get_xlim()
    for dot in reversed(dots):  # those that lie on others go without
        mean, rate = dot.summary.staleness.mean, dot.summary.trained_tokens_per_second
        at = ((mean - left) / (right - left), rate / axes.get_ylim()[1])
        wide = _NEAR + _LETTER * len(dot.along)
        if all(abs(at[0] - other[0]) > wide or abs(at[1] - other[1]) > _NEAR for other in placed):
            placed.append(at)
            axes.annotate(dot.along, (mean, rate), (5, -10), textcoords="offset points", fontsize=8)


def _draw_whiskers(axes: Axes, dots: Sequence[_Dot], looks: Mapping[str, tuple[str, str]], palette: Palette) -> None:
    for row, dot in enumerate(dots):
        colour, mark = looks[dot.series]
        figures = dot.summary.staleness
        axes.plot([figures.mean, figures.max], [row, row], color=colour, linewidth=1.2, solid_capstyle="butt")
        axes.plot([figures.mean, figures.p99], [row, row], color=colour, linewidth=4, alpha=0.6, solid_capstyle="butt")
        axes.plot([figures.max], [row], color=colour, marker="|", markersize=8, markeredgewidth=1.6)
        axes.plot([figures.mean], [row], color=colour, marker=mark, markersize=7, markeredgecolor=palette.paper)
        if dot.bound is not None:
            axes.plot([dot.bound], [row], color=palette.ink, marker="|", markersize=13, markeredgewidth=1.6)
    axes.set_yticks(range(len(dots)), [f"{dot.along}" for dot in dots], fontsize=8)
    axes.set_ylim(len(dots) - 0.4, -0.6)
    most = max(1, *(max(dot.summary.staleness.max, dot.bound or 0) for dot in dots))
    axes.set_xlim(-0.03 * most, 1.04 * most)
    whole_numbers(axes.xaxis)
    axes.set_xlabel("staleness of trained tokens (versions)\nmark mean, bar p99, line max, tall tick bound")
    style(axes, palette, grid="x")
