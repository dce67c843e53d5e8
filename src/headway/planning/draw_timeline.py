"""The timeline of a simulation: a lane each for the trainer, the engines and the gate; who worked, who waited, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.planning.paper import Axes, Figure, Palette, figure_of, style
from headway.sim.intervals import within
from headway.sim.summary import Interval

MOST_ENGINES = 12
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


def draw_timeline(intervals: Sequence[Interval], palette: Palette, window: tuple[float, float] | None = None) -> Figure:
    """Draw a window of the timeline; unset: the last `BATCHES` batches."""
    start, end = window or window_of(intervals)
    shown = list(within(intervals, start, end))
    lanes, engines = _lanes(shown)
    size, unit = _unit(end - start)
    figure = figure_of(palette, 9.6, 1.5 + 0.34 * len(lanes))
    axes = figure.subplots()
    used: dict[str, None] = {}
    for row, lane in enumerate(lanes):
        mine = [each for each in shown if each.who == lane]
        used |= dict.fromkeys(map(kind_of, mine))
        _lane(axes, row, mine, size, palette)
        busy = sum(each.end - each.start for each in mine if each.state in _WORK) / (end - start)
        axes.text(end / size, row, f"  {busy:.0%} {'open' if lane == 'gate' else 'at work'}", va="center", fontsize=8)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(start / size, end / size)
    more = "" if engines <= MOST_ENGINES else f"; {MOST_ENGINES} of {engines} engines"
    axes.set_xlabel(f"virtual time ({unit}){more}")
    style(axes, palette, grid="x")
    axes.spines["left"].set_visible(False)
    colours = _colours(palette)
    for kind in KINDS:
        if kind in used:
            axes.bar(
                [0], [0], color=colours[kind], label=kind, hatch="" if kind == WORKING else "////", edgecolor=palette.paper, linewidth=0
            )
    axes.set_xlim(start / size, end / size)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9)
    return figure


def _lanes(shown: Sequence[Interval]) -> tuple[list[str], int]:
    """Return who gets a lane, from above, and how many engines there are."""
    engines = list(dict.fromkeys(each.who for each in shown if each.who not in {"trainer", "gate"}))
    return ["trainer", *engines[:MOST_ENGINES], "gate"], len(engines)


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
