"""Stretches of time without gaps, in words: what a trainer, an engine or the gate was at, cut to a window and laid over each other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from headway.sim.summary import Interval

ROLLOUTS = "rollouts"
DOWN = "the orchestrator is down"

NO_BATCH: Mapping[str, str] = {
    "staleness": "no batch is full: the gate is closed by staleness",
    "ready groups": "no batch is full: the gate is closed by ready groups",
    "concurrency": "no batch is full: engines are busy with max_concurrent rollouts",
    "end of data": "no batch is full: there is no prompt left",
    "not published": "no batch is full: no engine serves a version yet",
    "open": "no batch is full: rollouts are starting",
}
"""Why the trainer has no batch, by what the gate says meanwhile."""
TRAINER: Mapping[str, str] = {
    "a batch to be written": "a batch is being written",
    "nothing": "a batch is on its way",
    "groups in flight that would grow too old": 'groups in flight would grow too old (on_stale = "wait")',
    "stalled": "it has stalled (a fault)",
    "lost": "it has died (a fault)",
    DOWN: DOWN,
}
"""Why else the trainer waits."""
ENGINE: Mapping[str, str] = {
    "environments": "its rollouts are with their environments",
    "staleness": "the gate is closed by staleness",
    "ready groups": "the gate is closed by ready groups",
    "concurrency": "max_concurrent rollouts are elsewhere",
    "end of data": "there is no prompt left",
    "not published": "it serves no version yet",
    "open": "rollouts are starting",
    "weight sync": "weight sync",
    DOWN: DOWN,
}
"""Why an engine neither decodes nor prefills."""


def within(intervals: Iterable[Interval], start: float, end: float) -> Iterator[Interval]:
    """Yield what lies in a window, cut to it."""
    for each in intervals:
        first, last = max(each.start, start), min(each.end, end)
        if first < last:
            yield each if (first, last) == (each.start, each.end) else Interval(each.who, first, last, each.state, each.why)


def trainer_in_words(trainer: Sequence[Interval], gate: Sequence[Interval]) -> Iterator[Interval]:
    """Yield the trainer's intervals with causes in words: where it waits for rollouts, as the gate was meanwhile."""
    starts = [each.start for each in gate]
    for each in trainer:
        if each.state == "training":
            yield each
        elif each.why != ROLLOUTS:
            yield Interval(each.who, each.start, each.end, each.state, TRAINER.get(each.why, each.why))
        else:
            first, after = max(0, bisect_right(starts, each.start) - 1), bisect_left(starts, each.end)
            yield from _beside(each, gate[first:after])


def _beside(waits: Interval, gate: Sequence[Interval]) -> Iterator[Interval]:
    """Yield a wait for rollouts in pieces, each for one cause. `gate`: what lies beside it."""
    since, why = waits.start, ""
    for beside in gate:
        cause = "open" if beside.state == "open" else beside.why
        now = NO_BATCH.get(cause, f"no batch is full: {cause}")
        if why and now != why:
            yield Interval(waits.who, since, beside.start, waits.state, why)
            since = beside.start
        why = now
    yield Interval(waits.who, since, waits.end, waits.state, why or NO_BATCH["open"])


def engine_in_words(engine: Iterable[Interval]) -> Iterator[Interval]:
    """Yield an engine's intervals with causes in words."""
    for each in engine:
        if each.state == "generating":
            yield each
        elif each.state == "lost":
            yield Interval(each.who, each.start, each.end, each.state, "it is lost (a fault)")
        else:
            yield Interval(each.who, each.start, each.end, each.state, ENGINE.get(each.why, each.why))


def shares(intervals: Iterable[Interval], seconds: float, *, but: str = "") -> dict[str, float]:
    """Return the share of so many seconds by cause, the largest first, of all states but one."""
    total: defaultdict[str, float] = defaultdict(float)
    for each in intervals:
        if each.state != but:
            total[each.why] += each.end - each.start
    return {why: spent / seconds for why, spent in sorted(total.items(), key=lambda item: -item[1])}


def share_of(state: str, intervals: Iterable[Interval], seconds: float) -> float:
    """Return the share of so many seconds in one state."""
    return sum(each.end - each.start for each in intervals if each.state == state) / seconds
