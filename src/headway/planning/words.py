"""What a plan says in words: what binds, what each change is worth, what is missing. Figures in, sentences out."""

from __future__ import annotations

from headway.planning.expected import Expected
from headway.settings import RolloutSection, steps_ahead


def percent(share: float) -> str:
    """Return a share of 1 for people."""
    return "0%" if share < 0.00005 else f"{share:.2%}" if share < 0.001 else f"{share:.1%}" if share < 0.9995 else "100%"


def duration(seconds: float) -> str:
    """Return seconds for people."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def times(factor: float) -> str:
    """Return a factor for people."""
    return "more than 20 x" if factor > 20 else f"{factor:.1f} x"


def binding_words(expected: Expected, rollout: RolloutSection, *, engines: int, enough: int | None, limit: str) -> str:
    """Say what binds. `enough`: engines that would keep the trainer busy, None: no number would. `limit`: what limits an engine."""
    waits = f"the trainer waits {percent(1 - expected.trainer_busy)} of the time"
    feeds = f"engines could feed {times(expected.engines_feed)}"
    if expected.binding == "trainer":
        return f"the trainer binds: {feeds} what it trains"
    if expected.binding == "wait":
        return f'on_stale = "wait" binds: {waits}, for groups that would become too old'
    if expected.binding == "gate":
        return f"the gate binds: {waits}, steps_ahead {steps_ahead(rollout):g} holds rollouts back; {feeds} what the trainer can train"
    if expected.binding == "max_concurrent":
        return f"max_concurrent binds: {waits}, {rollout.max_concurrent} rollouts in flight are too few, and engines could take more"
    kept = "no number of them would keep it busy" if enough is None else f"{enough} would keep it busy"
    return f"engines bind: {waits}; there {'is 1' if engines == 1 else f'are {engines}'}, {kept}{f' ({limit})' if limit else ''}"


def changes(before: Expected, after: Expected, *, always: tuple[str, ...] = ()) -> str:
    """Say what another setting changes, the figures that move first; "nothing changes" where none does."""
    moved, same = [], []
    for name, old, new, least, text in (
        ("batches/hour", before.batches_per_hour, after.batches_per_hour, 0.02 * before.batches_per_hour, _rate),
        (
            "trained tokens/s",
            before.trained_tokens_per_second,
            after.trained_tokens_per_second,
            0.02 * before.trained_tokens_per_second,
            _rate,
        ),
        ("masked", before.masked_share, after.masked_share, 0.002, percent),
        ("head coverage", before.head_coverage, after.head_coverage, 0.005, percent),
        ("mean", before.mean_staleness, after.mean_staleness, 0.1, _versions),
        ("max", before.max_staleness, after.max_staleness, 0.5, _whole),
        ("waste", before.waste - before.masked_share, after.waste - after.masked_share, 0.005, percent),
    ):
        if abs(new - old) >= least and text(old) != text(new):
            moved.append(f"{name} {text(old)} -> {text(new)}")
        elif name in always:
            same.append(f"{name} unchanged")
    return ", ".join([*moved, *same]) or "nothing changes"


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _versions(value: float) -> str:
    return f"{value:.1f}"


def _whole(value: float) -> str:
    return f"{value:.0f}"
