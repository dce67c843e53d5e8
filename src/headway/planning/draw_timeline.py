"""The timeline of a simulation: a lane each for the trainer, the engines and the gate; who worked, who waited, and why.

Of a sweep, the timelines of its points below each other, to one scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.planning.paper import Axes, Figure, Palette, figure_of, style
from headway.sim.intervals import within
from headway.sim.summary import Interval

MOST_ENGINES = 12
MOST_ENGINES_OF_EACH = 2  # of the points of a sweep
MOST_PANELS = 8
BATCHES = 10
_WORK = {"training", "generating", "open"}
WORKING = "at work (gate: open)"
KINDS = (WORKING, "gate closed by staleness", "max_concurrent reached", "weight sync", "environments", "fault", "something else")
_WORDS = (("staleness", 1), ("max_concurrent", 2), ("concurrency", 2), ("weight sync", 3), ("environments", 4), ("fault", 5), ("down", 5))


def kind_of(interval: Interval) -> str:
    """Return which of `KINDS` an interval is of, by its state and the words of its cause."""
    if interval.state in _WORK:
        return WORKING
    return KINDS[next((kind for word, kind in _WORDS if word in interval.why), 6)]


def window_of(intervals: Sequence[Interval], batches: int = BATCHES) -> tuple[float, float]:
    """Return from when until when the last batches were trained, the waits before them included."""
    trainings = [each for each in intervals if each.who == "trainer" and each.state == "training"]
    end = max(each.end for each in intervals)
    return (trainings[-batches - 1].end if len(trainings) > batches else 0.0), end


def last_batches(intervals: Sequence[Interval]) -> list[Interval]:
    """Return what a timeline shows: the last `BATCHES` batches, the waits before them included."""
    return list(within(intervals, *window_of(intervals))) if intervals else []


def draw_timeline(intervals: Sequence[Interval], palette: Palette) -> Figure:
    """Draw the last `BATCHES` batches."""
    start, end = window_of(intervals)
    shown = last_batches(intervals)
    lanes, engines = _lanes(shown, MOST_ENGINES)
    size, unit = _unit(end - start)
    figure = figure_of(palette, 9.6, 1.5 + 0.34 * len(lanes))
    axes = figure.subplots()
    _panel(axes, shown, lanes, end, size, palette)
    axes.set_xlabel(f"virtual time ({unit}){_more(MOST_ENGINES, engines)}")
    axes.set_xlim(start / size, end / size)
    _legend(figure, axes, shown, palette)
    return figure


def draw_timelines_of_each(named: Sequence[tuple[str, Sequence[Interval]]], palette: Palette) -> Figure:
    """Draw a panel for each point of a sweep (name, intervals), each from its own start, all to one scale; of many the first `MOST_PANELS`.

    The time that a point's last `BATCHES` batches took is how far its lanes reach.
    """
    points = [(name, _from_zero(last_batches(intervals))) for name, intervals in named[:MOST_PANELS]]
    ends = [max(each.end for each in shown) for _, shown in points]
    lanes = [_lanes(shown, MOST_ENGINES_OF_EACH) for _, shown in points]
    size, unit = _unit(max(ends))
    rows = [len(of_point) for of_point, _ in lanes]
    figure = figure_of(palette, 9.6, 1.3 + 0.5 * len(points) + 0.22 * sum(rows))
    panels = figure.subplots(len(points), sharex=True, squeeze=False, height_ratios=rows).flat
    for axes, (name, shown), (of_point, _), end in zip(panels, points, lanes, ends, strict=True):
        _panel(axes, shown, of_point, end, size, palette)
        axes.set_title(name.replace("\n", "  "), loc="left", fontsize=8)
    panels[0].set_xlim(0, max(ends) / size)
    more = f" (the first {len(points)} of {len(named)} points)" if len(named) > len(points) else ""
    engines = _more(MOST_ENGINES_OF_EACH, max(count for _, count in lanes))
    figure.supxlabel(f"virtual time ({unit}) of each point's last batches{engines}{more}", fontsize=10)
    _legend(figure, panels[0], [each for _, shown in points for each in shown], palette)
    return figure


def _from_zero(shown: Sequence[Interval]) -> list[Interval]:
    """Return intervals as if the first began at 0."""
    first = min(each.start for each in shown)
    return [Interval(each.who, each.start - first, each.end - first, each.state, each.why) for each in shown]


def _panel(axes: Axes, shown: Sequence[Interval], lanes: Sequence[str], end: float, size: float, palette: Palette) -> None:
    """Draw lanes from above, each with its share of the time at work. `end`: where they end, s; `size`: seconds of a unit."""
    span = end - min(each.start for each in shown)
    for row, lane in enumerate(lanes):
        mine = [each for each in shown if each.who == lane]
        _lane(axes, row, mine, size, palette)
        busy = sum(each.end - each.start for each in mine if each.state in _WORK) / span
        axes.text(end / size, row, f"  {busy:.0%} {'open' if lane == 'gate' else 'at work'}", va="center", fontsize=8)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    style(axes, palette, grid="x")
    axes.spines["left"].set_visible(False)


def _legend(figure: Figure, axes: Axes, shown: Sequence[Interval], palette: Palette) -> None:
    """Say what each colour means, of those that are to be seen."""
    used, colours, limits = set(map(kind_of, shown)), _colours(palette), axes.get_xlim()
    for kind in KINDS:
        if kind in used:
            hatch = "" if kind == WORKING else "////"
            axes.bar([0], [0], color=colours[kind], label=kind, hatch=hatch, edgecolor=palette.paper, linewidth=0)
    axes.set_xlim(limits)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9)


def _more(most: int, engines: int) -> str:
    return f"; {most} of {engines} engines" if engines > most else ""


def _lanes(shown: Sequence[Interval], most: int) -> tuple[list[str], int]:
    """Return who gets a lane, from above, and how many engines there are, of which `most` get one."""
    engines = list(dict.fromkeys(each.who for each in shown if each.who not in {"trainer", "gate"}))
    return ["trainer", *engines[:most], "gate"], len(engines)


def _lane(axes: Axes, row: int, mine: Sequence[Interval], size: float, palette: Palette) -> None:
    colours = _colours(palette)
    for kind, stretches in _by_kind(mine):
        work = kind == WORKING
        axes.broken_barh(
            [(each.start / size, (each.end - each.start) / size) for each in stretches],
            (row - 0.36, 0.72),
            facecolors=colours[kind],
            hatch="" if work else "////",
            edgecolor=palette.paper,
            linewidth=0.8 if row == 0 and work else 0,
        )


def _by_kind(mine: Sequence[Interval]) -> Iterator[tuple[str, list[Interval]]]:
    for kind in KINDS:
        if stretches := [each for each in mine if kind_of(each) == kind]:
            yield kind, stretches


def _colours(palette: Palette) -> dict[str, str]:
    return dict(zip(KINDS, (palette.work, *palette.causes, palette.fault, palette.other), strict=True))


def _unit(seconds: float) -> tuple[float, str]:
    if seconds < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")
