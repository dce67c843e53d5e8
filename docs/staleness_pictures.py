"""Draws the pictures of docs/concepts/staleness.md, each for light and for dark pages, from runs that headway's own components play.

    python docs/staleness_pictures.py             # writes docs/images/staleness-*.png; under two minutes of one core

Nothing is sketched: the runs are `headway.sim.run.simulate` on virtual time, the deadlines are those of `headway.rules.deadlines` on a
ledger folded from a run's own events. It prints the figures that the pictures show. Needs matplotlib, which the dev extra brings.
"""

# ruff: noqa: INP001, T201  a script, not a package; its figures are for the terminal

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headway.events import BatchAcknowledged, BatchFormed, Finished
from headway.rules.admission import limits_of
from headway.rules.batching import groups_to_take
from headway.rules.deadlines import holds_after, oldest_births, without
from headway.rules.ledger import Ledger, apply
from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Lognormal
from headway.sim.engine import EngineSettings
from headway.sim.run import SimResult, WorldSettings, simulate
from headway.sim.trainer import TrainerSettings
from headway.sim.worker import RolloutSettings

IMAGES = Path(__file__).parent / "images"
BOUND, WARM_UP, BATCHES, TOKENS_PER_SECOND = 4, 20, 60, 100.0
NEVER = 10**6


@dataclass(frozen=True)
class Palette:
    """Colours of one picture."""

    paper: str
    ink: str
    faint: str
    trained: str
    masked: str
    dropped: str
    over: str
    bound: str


PALETTES = {
    "light": Palette("#ffffff", "#24292f", "#d0d7de", "#2da44e", "#a5d6a7", "#8c959f", "#bc4c00", "#cf222e"),
    "dark": Palette("#0d1117", "#e6edf3", "#30363d", "#3fb950", "#1f5a2c", "#6e7681", "#f0883e", "#ff7b72"),
}

MODES: dict[str, dict[str, Any]] = {
    'on_stale = "train"': {"on_stale": "train"},
    'on_stale = "mask"': {"on_stale": "mask"},
    'on_stale = "drop"': {"on_stale": "drop"},
    'on_stale = "wait"': {"on_stale": "wait"},
    "mask, max_lead = 0": {"on_stale": "mask", "max_lead": 0},
    "mask, enforce = ship": {"on_stale": "mask", "enforce": "ship"},
    "mask, max_staleness = 8": {"on_stale": "mask", "max_staleness": 8},
    "mask, max_staleness = 8, steps_ahead = 2": {"on_stale": "mask", "max_staleness": 8, "steps_ahead": 2},
}


def play(groups: int, **keys: Any) -> SimResult:
    """Play a run: rollouts of lognormal length (sigma 1) whose mean is a trainer step, groups of one, a quarter more slots than needed."""
    world = WorldSettings(
        rollouts=RolloutSettings(
            seconds=Lognormal(1.0, 1.0), tokens_per_second=TOKENS_PER_SECOND, reward=lambda _prompt, _member, drawn: drawn
        ),
        engines=[EngineSettings(commit_seconds=0.02)],
        trainer=TrainerSettings(seconds=Lognormal(1.0, 0.1)),
        advantages=lambda rewards: rewards,
    )
    keys = {"max_staleness": BOUND, "steps_ahead": keys.get("max_staleness", BOUND)} | keys
    section = RolloutSection(groups_per_batch=groups, group_size=1, max_concurrent=5 * groups // 4, timeout_seconds=1e6, **keys)
    run = RunSection(steps=NEVER, drain_timeout_seconds=1e6, max_uncovered_batches=0, max_empty_batches=NEVER)
    return simulate(world, section, run, drain_at=float(WARM_UP + BATCHES))


def tokens_by_staleness(result: SimResult, which: str) -> Counter[int]:
    """Return how many tokens of the batches had each staleness; `which`: "tokens" (trained on) or "masked"."""
    total: Counter[int] = Counter()
    for batch in result.batches.values():
        total.update(getattr(batch, which))
    return total


def fates(result: SimResult, groups: int) -> dict[str, float]:
    """Return what became of the tokens, in batches' worth of tokens a second after the warm-up; `rate`: batches trained a second.

    Dropped is what engines wrote and no batch took, nor will: told for the whole run, as engines count, and scaled to the same time.
    """
    start, end = float(WARM_UP), float(WARM_UP + BATCHES)
    unit = groups * TOKENS_PER_SECOND * BATCHES
    trained = [event.k for event in result.events if isinstance(event, BatchAcknowledged) and start <= event.time < end]
    batches = [result.batches[k] for k in trained]
    finished = {event.group: event.sampled_tokens for event in result.events if isinstance(event, Finished)}
    used = sum(sum(batch.tokens.values()) + sum(batch.masked.values()) for batch in result.batches.values())
    lost = result.sampled_tokens - used - sum(finished[group] for group in result.ledger.ready)
    counted = sum(sum(batch.tokens.values()) + sum(batch.masked.values()) for batch in batches)
    return {
        "trained": sum(sum(batch.tokens.values()) for batch in batches) / unit,
        "masked": sum(sum(batch.masked.values()) for batch in batches) / unit,
        "dropped": lost / used * counted / unit,
        "rate": len(trained) / BATCHES,
    }


def style_axes(axes: Axes, palette: Palette) -> None:
    """Give axes the page's colours and no more frame than needed."""
    axes.set_facecolor(palette.paper)
    axes.grid(color=palette.faint, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in {"left", "bottom"})
        spine.set_color(palette.faint)


def draw_histograms(results: dict[str, SimResult], palette: Palette) -> Figure:
    """Draw the staleness of tokens, a panel for each mode at the same max_staleness."""
    figure, panels = plt.subplots(2, 2, sharex=True, sharey=True, figsize=(8.4, 5.2), layout="constrained", facecolor=palette.paper)
    last = 30
    for axes, name in zip(panels.flat, list(MODES)[:4], strict=True):
        tokens, masked = tokens_by_staleness(results[name], "tokens"), tokens_by_staleness(results[name], "masked")
        total = tokens.total() + masked.total()
        for counts, within, over in ((tokens, palette.trained, palette.over), (masked, palette.masked, palette.masked)):
            heights = np.zeros(last + 1)
            for staleness, count in counts.items():
                heights[min(staleness, last)] += 100 * count / total
            axes.bar(np.arange(last + 1), heights, width=0.9, color=[within] * (BOUND + 1) + [over] * (last - BOUND))
        over_bound = sum(count for staleness, count in tokens.items() if staleness > BOUND) / total
        note = f"stalest trained token: {max(tokens)}\ntrained on over the bound: {over_bound:.1%}\nmasked: {masked.total() / total:.1%}"
        axes.text(0.97, 0.93, note, transform=axes.transAxes, ha="right", va="top", fontsize=9)
        axes.axvline(BOUND + 0.5, color=palette.bound, linestyle=(0, (6, 3)), linewidth=1.6)
        axes.set_title(name, loc="left", fontsize=10, color=palette.ink)
        axes.set_yscale("log")
        axes.set_ylim(1e-3, 100)
        axes.set_yticks([0.001, 0.01, 0.1, 1, 10, 100], ["0.001", "0.01", "0.1", "1", "10", "100"])
        axes.set_xticks([0, 4, 10, 20, 30], ["0", "4", "10", "20", "30+"])
        style_axes(axes, palette)
        print(f"{name}: {len(results[name].batches)} batches, {note.replace(chr(10), ', ')}")
    figure.supxlabel("staleness in versions (dashed: max_staleness = 4)", fontsize=10)
    figure.supylabel("tokens in batches, % (logarithmic)", fontsize=10)
    return figure


def draw_fates(results: dict[str, SimResult], groups: int, palette: Palette) -> Figure:
    """Draw what became of the sampled tokens, a bar for each mode."""
    figure, axes = plt.subplots(figsize=(8.4, 3.9), layout="constrained", facecolor=palette.paper)
    names = list(results)
    rows = [fates(results[name], groups) for name in names]
    left = np.zeros(len(rows))
    colours = {"trained": palette.trained, "masked": palette.masked, "dropped": palette.dropped}
    for fate, colour in colours.items():
        widths = np.array([row[fate] for row in rows])
        axes.barh(names, widths, left=left, color=colour, height=0.62, label=fate)
        left += widths
    for y, (end, row, name) in enumerate(zip(left, rows, names, strict=True)):
        axes.text(end + 0.01, y, f"{row['rate']:.2f} batches/s, stalest {results[name].max_staleness}", va="center", fontsize=9)
        print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in row.items()))
    axes.set_xlim(0, 2.3)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.set_xlabel("tokens a second, in batches' worth (the trainer can take 1)")
    axes.invert_yaxis()
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    style_axes(axes, palette)
    axes.grid(visible=False, axis="y")
    return figure


@dataclass(frozen=True)
class Moment:
    """Batch k about to be formed: what would remain live, by deadline, and how much room the batches after k have until then."""

    time: float
    k: int
    due: dict[int, int]
    room: dict[int, int]
    ready: int


def moments(result: SimResult, groups: int) -> tuple[Moment, Moment]:
    """Return when a batch first had enough groups and had to wait, and when it was formed: the batch that waited for the most groups."""
    limits = limits_of(
        RolloutSection(groups_per_batch=groups, group_size=1, on_stale="wait", max_staleness=BOUND, steps_ahead=BOUND), NEVER
    )
    ledger, first, formed = Ledger(), dict[int, Moment](), dict[int, Moment]()
    for event in result.events:
        if isinstance(event, BatchFormed):
            formed[event.k] = _moment(ledger, event.time, groups)
        apply(ledger, event)
        k, n = ledger.next_batch, groups_to_take(ledger, limits)
        if n >= 0 and k not in first and not holds_after(ledger, limits, n):
            first[k] = _moment(ledger, event.time, groups)
    missing = {k: max(moment.due[d] - moment.room[d] for d in moment.due) for k, moment in first.items() if k in formed}
    worst = max(missing, key=missing.__getitem__)
    return first[worst], formed[worst]


def _moment(ledger: Ledger, now: float, groups: int) -> Moment:
    k = ledger.next_batch
    remaining = without(ledger.births, oldest_births(ledger.ready_births, groups))
    deadlines = range(k, k + BOUND + 1)
    due = {d: sum(count for birth, count in remaining.items() if birth + BOUND <= d) for d in deadlines}
    return Moment(now, k, due, {d: groups * (d - k) for d in deadlines}, len(ledger.ready))


def draw_deadlines(pair: tuple[Moment, Moment], palette: Palette) -> Figure:
    """Draw H(k + 1) where it fails and where it holds: live groups due by each batch against the room until there."""
    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(8.4, 3.4), layout="constrained", facecolor=palette.paper)
    for axes, moment, what in zip(panels, pair, ("waits: H(k + 1) would break", "is formed"), strict=True):
        deadlines, due, room = (np.array(list(values)) for values in (moment.due, moment.due.values(), moment.room.values()))
        axes.bar(deadlines, np.minimum(due, room), width=0.8, color=palette.trained, label="due by then, with a place")
        axes.bar(deadlines, np.maximum(due - room, 0), bottom=room, width=0.8, color=palette.over, label="due by then, without")
        axes.step(np.append(deadlines, deadlines[-1] + 1) - 0.5, np.append(room, room[-1]), where="post", color=palette.ink, label="room")
        axes.set_title(f"{moment.ready} ready: batch {moment.k} {what}", loc="left", fontsize=10, color=palette.ink)
        axes.set_xticks(deadlines, [f"{d}" for d in deadlines])
        axes.set_xlabel("deadline d: batches k + 1 to d")
        style_axes(axes, palette)
        print(f"t = {moment.time:.2f}: batch {moment.k}, {moment.ready} ready, due {moment.due}, room {moment.room}")
    panels[0].set_ylim(top=70)
    panels[0].set_ylabel("groups that would stay live")
    panels[0].legend(loc="upper left", frameon=False, fontsize=9)
    return figure


def save(name: str, drawn: Callable[[Palette], Figure]) -> None:
    """Draw a picture with both palettes."""
    for kind, palette in PALETTES.items():
        ink = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), palette.ink)
        with plt.rc_context({"font.size": 10, "font.family": "DejaVu Sans", **ink}):
            figure = drawn(palette)
            figure.savefig(IMAGES / f"staleness-{name}-{kind}.png", dpi=150, facecolor=palette.paper)
            plt.close(figure)


def main() -> None:
    """Play the runs and draw the pictures."""
    IMAGES.mkdir(exist_ok=True)
    groups = 256
    results = {name: play(groups, **keys) for name, keys in MODES.items()}
    save("modes", lambda palette: draw_histograms(results, palette))
    save("fates", lambda palette: draw_fates(results, groups, palette))
    pair = moments(play(16, on_stale="wait"), 16)
    save("deadlines", lambda palette: draw_deadlines(pair, palette))


if __name__ == "__main__":
    main()
