"""Who did what when, and why not: the notes taken during a run as intervals without gaps, up to the instant at which its play ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from headway.events import AnyEvent, BatchFormed, Finished, GroupDropped
from headway.sim.engine import SimEngine
from headway.sim.observer import Observer
from headway.sim.summary import Interval

Stretch = tuple[float, float, str, str]
"""From, until, state, why."""


def gate_intervals(observed: Observer, end: float) -> list[Interval]:
    """Return when the gate was open, and why it was closed."""
    return [
        Interval("gate", start, until, *(("open", "") if why == "open" else ("closed", why)))
        for start, until, why in _stretches(observed.gate, end)
    ]


def trainer_intervals(observed: Observer, log: Iterable[Stretch], end: float) -> list[Interval]:
    """Return when the trainer trained, by its log, and what it waited for otherwise."""
    waits = [(start, until, "waiting", why) for start, until, why in _stretches(observed.waits, end)]
    return [Interval("trainer", *stretch) for stretch in overlaid(waits, log, end)]


def engine_intervals(engine: SimEngine, gate: Iterable[Interval], end: float) -> list[Interval]:
    """Return what an engine did; where it idled and nobody was there, what the gate said."""
    idles = [(interval.start, interval.end, "idle", interval.why or interval.state) for interval in gate]
    busy: list[Stretch] = []
    for start, until, state in _stretches(list(engine.generation.states), end):
        if state == "environments":
            busy.append((start, until, "idle", state))
        elif state != "idle":
            busy.append((start, until, state, "weight sync" if state == "paused" else ""))
    lost: list[Stretch] = []
    for dies, back in engine.deaths:
        served = min((at for at in engine.served_at if at >= back), default=inf)
        lost.append((dies, served, "lost", ""))
    return [Interval(engine.name, *stretch) for stretch in overlaid(list(overlaid(idles, busy, end)), lost, end)]


def most_waiting_tokens(events: Iterable[AnyEvent], since: float) -> int:
    """Return how many tokens finished rollouts held at most, from `since` on, while their batch was not formed."""
    held: dict[int, int] = {}
    total = most = 0
    for event in events:
        if total > most and event.time > since:
            most = total
        match event:
            case Finished():
                held[event.group] = held.get(event.group, 0) + event.tokens
                total += event.tokens
            case GroupDropped():
                total -= held.pop(event.group, 0)
            case BatchFormed():
                total -= sum(held.pop(group, 0) for group in event.groups)
            case _:
                pass
    return max(most, total)


def overlaid(under: Sequence[Stretch], over: Iterable[Stretch], end: float) -> Iterator[Stretch]:
    """Yield what lies uppermost, up to `end`: both are in order, and neither overlaps itself; `under` has no gaps."""
    at, index = 0.0, 0
    for start, until, *rest in [*over, (end, inf, "", "")]:
        while at < min(start, end) and index < len(under):
            _, below_until, state, why = under[index]
            stop = min(below_until, start, end)
            if at < stop:
                yield at, stop, state, why
            at = max(at, stop)
            if below_until <= at:
                index += 1
        if at < min(until, end) and start < end:
            yield max(at, start), min(until, end), *rest  # type: ignore[misc]
            at = min(until, end)
        while index < len(under) and under[index][1] <= at:
            index += 1


def _stretches(changes: Sequence[tuple[float, str]], end: float) -> list[tuple[float, float, str]]:
    """Return (from, until, what) between changes, up to `end`: the first begins at 0, none is empty, and no two that touch are alike."""
    stretches: list[tuple[float, float, str]] = []
    start = 0.0
    for (_, what), (then, _) in zip(changes, [*changes[1:], (end, "")], strict=True):
        until = min(then, end)
        if until > start:
            if stretches and stretches[-1][2] == what:
                start = stretches.pop()[0]
            stretches.append((start, until, what))
            start = until
    return stretches
