"""The pictures of a simulation and of a sweep, each for light and for dark pages, as PNG. They need the extra `pictures` (matplotlib).

Where it is not installed, tables are written all the same, and one line says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headway.planning.draw_frontier import draw_frontier
from headway.planning.draw_staleness import draw_lengths, draw_staleness, draw_staleness_of_each
from headway.planning.draw_timeline import BATCHES, draw_timeline, draw_timelines_of_each
from headway.planning.paper import PALETTES, Draw, brief, png
from headway.planning.sweep import Outcome, short_name
from headway.sim.scenario import Scenario
from headway.sim.summary import Interval, Summary

MISSING = "no pictures: matplotlib is not installed: pip install 'headway[pictures]'"


@dataclass(frozen=True)
class Picture:
    """A picture. `caption`: what is to be seen, in words; `png`: its bytes by "light" and "dark"."""

    name: str
    title: str
    caption: str
    png: Mapping[str, bytes]


def simulation_pictures(scenario: Scenario, summary: Summary, intervals: Sequence[Interval]) -> list[Picture]:
    """Return the pictures of a simulation; of one without intervals no timeline. Raises ImportError without matplotlib."""
    bound = bound_of(scenario)
    limit = "nothing is bounded" if bound is None else f"dashed: max_staleness = {bound}"
    pictures = [
        _picture(
            "staleness",
            "How stale tokens are",
            f"Tokens in batches by staleness; hatched ones are masked as too old; {limit}.",
            lambda palette: draw_staleness(summary, bound, palette),
        )
    ]
    if intervals:
        pictures.append(
            _picture(
                "timeline",
                "Who worked, who waited, and why",
                "The last batches of the simulation: trainer, engines and gate. Hatched: not at work, by cause.",
                lambda palette: draw_timeline(intervals, palette),
            )
        )
    pictures.append(
        _picture(
            "lengths",
            "Whether long rollouts train less",
            "Share of the sampled tokens that were trained on, and of the rollouts whose first token was, by length.",
            lambda palette: draw_lengths(summary.length_bias, palette),
        )
    )
    return pictures


def sweep_pictures(outcomes: Sequence[Outcome]) -> list[Picture]:
    """Return the pictures of a sweep; none where no point has figures. Raises ImportError without matplotlib."""
    shown = [(_title(each), each.summary, bound_of(each.point.scenario)) for each in outcomes if each.summary and each.point.scenario]
    if not shown:
        return []
    pictures = [
        _picture(
            "frontier",
            "What throughput costs in staleness",
            "Left: trained tokens a second against the mean staleness of trained tokens. Right: p99 and max of each point, line by line.",
            lambda palette: draw_frontier(outcomes, palette),
        ),
        _picture(
            "staleness",
            "How stale tokens are at each point",
            "Tokens in batches by staleness; hatched ones are masked as too old; dashed: max_staleness.",
            lambda palette: draw_staleness_of_each(shown, palette),
        ),
    ]
    if timelines := [(_title(each), each.intervals) for each in outcomes if each.intervals]:
        pictures.append(
            _picture(
                "timeline",
                "Who worked, who waited, and why, at each point",
                f"The last {BATCHES} batches of each point, all to one scale: trainer, engines and gate. Hatched: not at work, by cause.",
                lambda palette: draw_timelines_of_each(timelines, palette),
            )
        )
    return pictures


def drawn_or_told(draw: Callable[[], list[Picture]], tell: Callable[[str], None]) -> list[Picture]:
    """Return the pictures; where matplotlib is not installed none, and one line for the reader."""
    try:
        return draw()
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        tell(MISSING)
        return []


def files_of(pictures: Sequence[Picture]) -> dict[str, bytes]:
    """Return the pictures as files by their names: `staleness-light.png`, `staleness-dark.png`."""
    return {f"{picture.name}-{kind}.png": data for picture in pictures for kind, data in picture.png.items()}


def bound_of(scenario: Scenario) -> int | None:
    """Return max_staleness where anything keeps to it."""
    return None if scenario.rollout.on_stale == "train" else scenario.rollout.max_staleness


def _title(outcome: Outcome) -> str:
    return "\n".join(f"{short_name(key)}={brief(value)}" for key, value in outcome.point.values.items())


def _picture(name: str, title: str, caption: str, draw: Draw) -> Picture:
    return Picture(name, title, caption, {kind: png(draw, palette) for kind, palette in PALETTES.items()})
