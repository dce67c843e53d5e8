"""Draws the pictures of docs/how-to/simulate.md and size-a-run.md, each for light and for dark pages, from the examples they go through.

    python docs/simulation_pictures.py            # writes docs/images/simulate-*.png and size-*.png; about a minute of one core
    python docs/simulation_pictures.py size       # only those whose names begin so

Nothing is sketched: simulations are those of `headway simulate`, drawn by what draws its own pictures; what a plan says is asked of
`headway plan`, by closed forms. It prints the figures that the pictures show. Needs matplotlib, which the dev extra brings.
"""

# ruff: noqa: INP001, T201  a script, not a package; its figures are for the terminal

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from headway.planning import forms
from headway.planning.advice import Plan, recommend
from headway.planning.balance import balance
from headway.planning.draw_frontier import draw_frontier
from headway.planning.draw_timeline import draw_timeline
from headway.planning.expected import expect
from headway.planning.paper import PALETTES, Axes, Draw, Figure, Palette, figure_of, png, style
from headway.planning.quiet import quietly
from headway.planning.scenario_file import load_scenario
from headway.planning.sensitivity import turned
from headway.planning.sweep import parse_sweep, points_of, run_points
from headway.planning.sweep_table import sweep_text
from headway.sim.distributions import Empirical
from headway.sim.figures import summarise, timeline
from headway.sim.play import play
from headway.sim.scenario import Scenario, tokens_of
from headway.sim.summary import Interval, Summary

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples/scenarios"
SWEEP = ("max_staleness=2,4,8", "steps_ahead=1,2,3,4")  # as docs/how-to/simulate.md types it
STEPS_AHEAD = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)


def simulated(scenario: Scenario) -> tuple[Summary, Sequence[Interval]]:
    """Return the figures of a scenario that was played, and who was at what."""
    with quietly():
        played = play(scenario)
    return summarise(played), timeline(played)


def sweep_picture() -> Draw:
    """Return the frontier of the how-to's sweep."""
    base = load_scenario(EXAMPLES / "math.toml", ["run.steps=30"])
    points = points_of(base, parse_sweep(SWEEP))
    outcomes = list(run_points(points, simulated))
    print(sweep_text("math", outcomes, len(points)))
    return lambda palette: draw_frontier(outcomes, palette)


def timeline_picture() -> Draw:
    """Return the timeline of the how-to's example."""
    _, intervals = simulated(load_scenario(EXAMPLES / "math.toml", ["run.steps=20"]))
    return lambda palette: draw_timeline(intervals, palette)


def chosen(scenario: Scenario, plan: Plan) -> Scenario:
    """Return the scenario with the knobs that a plan chose."""
    choice = plan.choice
    return turned(
        scenario,
        groups_per_batch=choice.groups_per_batch,
        max_concurrent=choice.max_concurrent,
        max_staleness=choice.max_staleness,
        steps_ahead=choice.steps_ahead,
    )


def draw_sizes(scenario: Scenario, plan: Plan, palette: Palette) -> Figure:
    """Draw the lengths as rollouts and as tokens, in the seconds that they take by the plan, and from what age tokens are masked."""
    lengths, planned = tokens_of(scenario), chosen(scenario, plan)
    assert isinstance(lengths, Empirical)  # noqa: S101  the example is a file of values
    seconds = np.array(lengths.values) * plan.expected.rollout_seconds / lengths.mean
    edges = np.arange(0, seconds.max() + 10, 10.0)
    width = edges[1]
    rollouts, tokens = (100 * np.histogram(seconds, edges, weights=weights)[0] for weights in (None, seconds))
    figure = figure_of(palette, 8.4, 4.0)
    axes = figure.subplots()
    axes.bar(edges[:-1] + 0.3 * width, rollouts / len(seconds), 0.38 * width, color=palette.work, label="of the rollouts")
    axes.bar(edges[:-1] + 0.7 * width, tokens / seconds.sum(), 0.38 * width, color=palette.series[2], hatch="////", edgecolor=palette.paper)
    axes.bar([0], [0], color=palette.series[2], hatch="////", edgecolor=palette.paper, linewidth=0, label="of the tokens")
    state = balance(planned)
    top = 1.02 * max((rollouts / len(seconds)).max(), (tokens / seconds.sum()).max())
    marks = {
        "mean of a rollout": plan.expected.rollout_seconds,
        f"mean of a group of {planned.rollout.group_size}:\nits longest rollout": plan.expected.group_seconds,
        f"older is masked at\nmax_staleness {plan.choice.max_staleness // 2}": masked_from(planned, plan.choice.max_staleness // 2),
        f"older is masked at\nmax_staleness {plan.choice.max_staleness}": masked_from(planned, plan.choice.max_staleness),
    }
    for row, (name, at) in enumerate(marks.items()):
        axes.axvline(at, color=palette.ink, linestyle=(0, (5, 3)), linewidth=1.2)
        box = {"facecolor": palette.paper, "edgecolor": "none", "pad": 1}
        axes.text(at + 2, top * (1 - 0.17 * (row % 3)), f"{name}\n{at:.0f} s", va="top", fontsize=8, bbox=box)
        print(f"{name.replace(chr(10), ' ')}: {at:.1f} s")
    print(f"cycle {state.cycle:.1f} s, from a batch's forming to its version {state.delay:.1f} s")
    axes.set_ylim(0, 1.05 * top)
    axes.set_xlim(0, max(edges[-1], 1.25 * max(marks.values())))
    axes.set_xlabel("seconds from the first token of a rollout to its last, at the plan's load")
    axes.set_ylabel("share (%)")
    style(axes, palette, grid="y")
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=9)
    return figure


def masked_from(scenario: Scenario, bound: int) -> float:
    """Return the age at the end of its group, in seconds, from which a token is masked."""
    state = balance(scenario)
    return forms.youngest_masked(bound, state.cycle, state.delay)


def draw_choices(scenario: Scenario, plan: Plan, palette: Palette) -> Figure:
    """Draw what each batch size and steps_ahead would bring, by closed forms, and what the plan took."""
    figure = figure_of(palette, 8.4, 4.2)
    axes = figure.subplots()
    for colour, mark, (size, found) in zip(palette.series, "os^D", curves(scenario, plan), strict=False):
        ahead, stale, rate = (np.array(column) for column in zip(*found, strict=True))
        axes.plot(stale, rate, color=colour, marker=mark, markersize=6, markeredgecolor=palette.paper, label=f"groups_per_batch {size}")
        for x, y in dict.fromkeys(zip(stale, rate, strict=True)):
            alike = ahead[(stale == x) & (rate == y)]
            words = f"{alike[0]:g}" if len(alike) == 1 else f"{alike[0]:g} to {alike[-1]:g}"
            axes.annotate(words, (x, y), (3, -12), textcoords="offset points", fontsize=8)
    taken = plan.expected
    axes.plot([taken.mean_staleness], [taken.trained_tokens_per_second], "o", markersize=15, markerfacecolor="none", color=palette.ink)
    words = f"the plan: groups_per_batch {plan.choice.groups_per_batch}, steps_ahead {plan.choice.steps_ahead:g}"
    at = (taken.mean_staleness, taken.trained_tokens_per_second)
    axes.annotate(words, at, (0, 16), textcoords="offset points", ha="center", fontsize=9)
    label(axes)
    style(axes, palette)
    axes.legend(loc="lower right", facecolor=palette.paper, edgecolor=palette.paper, framealpha=1, fontsize=9)
    return figure


def label(axes: Axes) -> None:
    """Say what is on the axes of the choices."""
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
    axes.set_xlim(left=0)
    axes.set_xlabel("mean staleness of trained tokens (versions), by formula; at the marks: steps_ahead")
    axes.set_ylabel("trained tokens a second")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def curves(scenario: Scenario, plan: Plan) -> Iterator[tuple[int, list[tuple[float, float, float]]]]:
    """Yield each batch size with (steps_ahead, mean staleness, trained tokens a second); max_concurrent is the plan's."""
    planned = chosen(scenario, plan)
    for size in scenario.budget.groups_per_batch:
        found = []
        for ahead in STEPS_AHEAD:
            if ahead <= planned.rollout.max_staleness:
                expected = expect(turned(planned, groups_per_batch=size, steps_ahead=ahead))
                found.append((ahead, expected.mean_staleness, expected.trained_tokens_per_second))
        print(f"groups_per_batch {size}: " + ", ".join(f"A {a:g}: {x:.2f}, {y:,.0f}/s" for a, x, y in found))
        yield size, found


def main() -> None:
    """Draw what is asked for."""
    asked = tuple(sys.argv[1:]) or ("",)
    scenario = load_scenario(EXAMPLES / "measured.toml")
    plan = recommend(scenario, None)
    pictures = {
        "simulate-sweep": sweep_picture,
        "simulate-timeline": timeline_picture,
        "size-lengths": lambda: lambda palette: draw_sizes(scenario, plan, palette),
        "size-choices": lambda: lambda palette: draw_choices(scenario, plan, palette),
    }
    for name, made in pictures.items():
        if name.startswith(asked):
            draw = made()
            for kind, palette in PALETTES.items():
                (DOCS / "images" / f"{name}-{kind}.png").write_bytes(png(draw, palette))


if __name__ == "__main__":
    main()
