"""Pictures of how stale tokens are, the masked ones and the bound drawn in; and of whether long rollouts train less than short ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from headway.planning.paper import Axes, Figure, Palette, figure_of, style, whole_numbers
from headway.planning.simulate_text import percent
from headway.sim.summary import LengthBias, Staleness, Summary

MOST_PANELS = 12
_MOST_BARS = 24  # what is staler shares the last one
_NEXT_TO_NOTHING = 1e-3  # of the tokens, which needs no bar of its own
_COLUMNS = 3


def draw_staleness(summary: Summary, bound: int | None, palette: Palette) -> Figure:
    """Draw the tokens in batches by staleness. `bound`: max_staleness; None: nothing is bounded."""
    figure = figure_of(palette, 8.4, 3.6)
    axes = figure.subplots()
    last = _last(summary.staleness, bound)
    trained, masked = _shares(summary.staleness, last)
    _bars(axes, trained, masked, palette)
    for staleness, (below, above) in enumerate(zip(trained, masked, strict=True)):
        if below + above:
            axes.annotate(
                _short(below + above), (staleness, below + above), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=8
            )
    _bound(axes, bound, palette)
    axes.set_ylim(0, 1.18 * max([1e-9, *map(sum, zip(trained, masked, strict=True))]))
    axes.set_xlabel("staleness of a token when it is trained on (versions)")
    axes.set_ylabel("tokens in batches (%)")
    figures = summary.staleness
    note = f"trained tokens: mean {figures.mean:.2f}, p99 {figures.p99}, max {figures.max}; masked {percent(summary.masked_share)}"
    axes.set_title(note, loc="left", fontsize=10)
    _ticks(axes, last, summary.staleness)
    style(axes, palette, grid="y")
    figure.legend(*_legend(axes), loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    return figure


def draw_staleness_of_each(named: Sequence[tuple[str, Summary, int | None]], palette: Palette) -> Figure:
    """Draw a small panel for each point of a sweep (name, figures, bound), all to one scale; of many the first `MOST_PANELS`."""
    shown = named[:MOST_PANELS]
    columns = min(_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = figure_of(palette, 8.4, 0.9 + 1.75 * rows)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    last = max(_last(summary.staleness, bound, 5 * _NEXT_TO_NOTHING) for _, summary, bound in shown)
    for axes in panels.flat[len(shown) :]:
        axes.set_visible(False)
    for index, (axes, (name, summary, bound)) in enumerate(zip(panels.flat, shown, strict=False)):
        trained, masked = _shares(summary.staleness, last)
        _bars(axes, trained, masked, palette)
        _bound(axes, bound, palette)
        axes.set_title(name, loc="left", fontsize=8)
        note = f"mean {summary.staleness.mean:.2f}\nmasked {percent(summary.masked_share)}"
        box = {"facecolor": palette.paper, "edgecolor": "none", "pad": 1}  # the bound may stand where the words do
        axes.text(0.98, 0.95, note, transform=axes.transAxes, ha="right", va="top", fontsize=8, bbox=box)
        _ticks(axes, last, *(each.staleness for _, each, _ in shown))
        style(axes, palette, grid="y")
        if index + columns >= len(shown):
            axes.xaxis.set_tick_params(labelbottom=True)
    panels.flat[0].set_ylim(0, 1.06 * max(sum(both) for _, each, _ in shown for both in zip(*_shares(each.staleness, last), strict=True)))
    handles, labels = _legend(panels.flat[0])
    figure.legend(handles, [label.partition(" = ")[0] for label in labels], loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    more = f" (the first {len(shown)} of {len(named)} points)" if len(named) > len(shown) else ""
    figure.supxlabel(f"staleness of a token when it is trained on (versions){more}", fontsize=10)
    figure.supylabel("tokens in batches (%)", fontsize=10)
    return figure


def draw_lengths(bias: LengthBias, palette: Palette) -> Figure:
    """Draw how much of rollouts is trained on by their length, and how often their first token is."""
    figure = figure_of(palette, 8.4, 3.4)
    axes = figure.subplots()
    tenths = range(1, len(bias.tokens) + 1)
    axes.bar(tenths, [100 * share for share in bias.trained_share], width=0.7, color=palette.work, label="tokens: trained on")
    axes.plot(
        tenths,
        [100 * share for share in bias.head_coverage],
        color=palette.ink,
        marker="o",
        markerfacecolor=palette.masked,
        markeredgecolor=palette.paper,
        markersize=7,
        linewidth=1.2,
        label="rollouts: first token trained on",
    )
    axes.set_xticks(tenths, [_count(tokens) for tokens in bias.tokens])
    axes.set_ylim(0, 105)
    axes.set_yticks(range(0, 101, 25))
    axes.set_xlabel("finished rollouts by length, a tenth each: mean tokens of one")
    axes.set_ylabel("share (%)")
    style(axes, palette, grid="y")
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=9)
    return figure


def _last(figures: Staleness, bound: int | None, nothing: float = _NEXT_TO_NOTHING) -> int:
    """Return the staleness of the last bar: what is beyond is next to nothing, and is in that bar."""
    counts = Counter(figures.masked_histogram)
    counts.update(dict(enumerate(figures.histogram)))
    stalest, beyond, last = max(counts, default=0), 0, max(counts, default=0)
    while last > 1 and beyond + counts[last] <= nothing * counts.total():
        beyond += counts[last]
        last -= 1
    return max(min(last + 1, stalest, _MOST_BARS), 1, bound + 1 if bound is not None and stalest > bound else 0)


def _shares(figures: Staleness, last: int) -> tuple[list[float], list[float]]:
    """Return the per cent of the tokens by staleness up to `last`, trained and masked; what is staler is in the last."""
    total = sum(figures.histogram) + sum(figures.masked_histogram.values())
    trained, masked = [0.0] * (last + 1), [0.0] * (last + 1)
    for staleness, count in enumerate(figures.histogram):
        trained[min(staleness, last)] += 100 * count / max(1, total)
    for staleness, count in figures.masked_histogram.items():
        masked[min(staleness, last)] += 100 * count / max(1, total)
    return trained, masked


def _bars(axes: Axes, trained: Sequence[float], masked: Sequence[float], palette: Palette) -> None:
    axes.bar(range(len(trained)), trained, width=0.86, color=palette.work, label="trained on")
    axes.bar(
        range(len(masked)),
        masked,
        bottom=trained,
        width=0.86,
        color=palette.masked,
        hatch="////",
        edgecolor=palette.paper,
        linewidth=0,
        label="masked: context only",
    )


def _bound(axes: Axes, bound: int | None, palette: Palette) -> None:
    if bound is not None:
        axes.axvline(bound + 0.5, color=palette.ink, linestyle=(0, (5, 3)), linewidth=1.4, label=f"max_staleness = {bound}")


def _legend(axes: Axes) -> tuple[list[Any], list[str]]:
    """Return what is in the legend, bars before the line."""
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda index: labels[index].startswith("max_staleness"))
    return [handles[index] for index in order], [labels[index] for index in order]


def _ticks(axes: Axes, last: int, *figures: Staleness) -> None:
    stalest = max([0, *(max([len(each.histogram) - 1, *each.masked_histogram], default=0) for each in figures)])
    axes.set_xlim(-0.6, last + 0.6)
    whole_numbers(axes.xaxis)
    if stalest > last:
        step = max(1, math.ceil(last / 6))
        ticks = [*range(0, last - step // 2, step), last]
        axes.set_xticks(ticks, [*map(str, ticks[:-1]), f"{last}+"])


def _short(per_cent: float) -> str:
    return f"{per_cent:.0f}%" if per_cent >= 9.5 else f"{per_cent:.1f}%" if per_cent >= 0.05 else "<0.1%"


def _count(tokens: float) -> str:
    return f"{tokens:,.0f}"
