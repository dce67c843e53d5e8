"""What a plan says in words: what binds, what each change is worth, what is missing. Figures in, sentences out."""

from __future__ import annotations

from collections.abc import Collection

from headway.planning.expected import Expected
from headway.planning.simulate_text import percent
from headway.settings import RolloutSection, steps_ahead

NOTHING = "nothing changes"


def times(factor: float) -> str:
    """Return a factor for people."""
    return "more than 20 x" if factor > 20 else f"{factor:.1f} x"


def rate_text(value: float) -> str:
    """Return a rate for people, as tables show it."""
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def binding_words(expected: Expected, rollout: RolloutSection, *, engines: int, enough: int | None, limit: str) -> str:
    """Say what binds. `enough`: engines that would keep the trainer busy, None: no number would. `limit`: what limits an engine."""
    waits = f"the trainer waits {percent(1 - expected.trainer_busy)} of the time"
    feeds = f"engines could feed {times(expected.engines_feed)}"
    if expected.binding == "trainer":
        return f"the trainer binds: {feeds} what it trains"
    if expected.binding == "wait":
        return f'on_stale = "wait" binds: {waits}, for groups that would become too old'
    if expected.binding == "sync":
        return f'weight_sync = "wait" binds: {waits}, for engines that run empty before each sync'
    if expected.binding == "gate":
        return f"the gate binds: {waits}, steps_ahead {steps_ahead(rollout):g} holds rollouts back; {feeds} what the trainer can train"
    if expected.binding == "max_concurrent":
        return f"max_concurrent binds: {waits}, {rollout.max_concurrent} rollouts in flight are too few, and engines could take more"
    kept = "no number of them would keep it busy" if enough is None else f"{enough} would keep it busy"
    return f"engines bind: {waits}; there {'is 1' if engines == 1 else f'are {engines}'}, {kept}{f' ({limit})' if limit else ''}"


def changes(before: Expected, after: Expected, *, always: Collection[str] = (), tokens: bool = False) -> str:
    """Say what another setting changes; "nothing changes" where no figure moves.

    `always`: figures of which it is said that they stay. `tokens`: also trained tokens/s (they follow from the others while batches stay as
    large as they were).
    """
    rate, per_second = before.batches_per_hour, before.trained_tokens_per_second
    figures = [
        ("batches/hour", rate, after.batches_per_hour, 0.02 * rate, _rate),
        ("masked", before.masked_share, after.masked_share, 0.002, percent),
        ("head coverage", before.head_coverage, after.head_coverage, 0.005, percent),
        ("mean", before.mean_staleness, after.mean_staleness, 0.25, _versions),
        ("max", before.max_staleness, after.max_staleness, 0.5, _whole),
        ("other waste", before.waste - before.masked_share, after.waste - after.masked_share, 0.005, percent),
    ]
    if tokens:
        figures.insert(1, ("trained tokens/s", per_second, after.trained_tokens_per_second, 0.02 * per_second, _rate))
    moved, same = [], []
    for name, old, new, least, text in figures:
        if abs(new - old) >= least and text(old) != text(new):
            moved.append(f"{name} {text(max(0.0, old))} -> {text(max(0.0, new))}")
        elif name in always:
            same.append(f"{name} unchanged")
    return ", ".join([*moved, *same]) or NOTHING


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _versions(value: float) -> str:
    return f"{value:.1f}"


def _whole(value: float) -> str:
    return f"{value:.0f}"


def rate_words(value: float, of: float) -> str:
    """Return how many times one number is another, roughly."""
    return f"{value / max(of, 1):.1f} x"
