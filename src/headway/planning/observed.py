"""What a run's journal tells of its world: one pass over the events, and plain numbers of a window of time.

Times are those of the events, in seconds. Everything of rollouts that this run's engines have not written (replayed, external) is left out,
and so is what began in one process of the run and ended in another: nobody knows how long it really took. Where a run was taken up by a
clock that was behind (another host's), all its times from there on are later by so much: what was measured is differences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headway.events import (
    Admitted,
    AnyEvent,
    BatchAcknowledged,
    BatchFormed,
    Continued,
    EngineState,
    EvalFinished,
    EvalStarted,
    Finished,
    GroupDropped,
    Ingested,
    Published,
    Ready,
    Resumed,
    RolloutDropped,
)
from headway.rules.ledger import Ledger, apply
from headway.sim.distributions import Floats


class Attempted(NamedTuple):
    """A rollout that finished: from its start until it was durable; `tokens` counts all positions."""

    group: int
    start: float
    end: float
    sampled_tokens: int
    tokens: int
    turns: int


class Trained(NamedTuple):
    """A batch that was trained: when it was formed and acknowledged; `before`: when the batch before it was (-inf: in another process)."""

    k: int
    formed: float
    acknowledged: float
    before: float

    @property
    def seconds(self) -> float:
        """How long the trainer took, without the time in which the batch waited for the one before."""
        return self.acknowledged - max(self.formed, self.before)


class Synced(NamedTuple):
    """A publication: when, how many engines serve it, and seconds that the sync took each of them."""

    time: float
    engines: int
    seconds: float


@dataclass
class Observed:
    """What happened from `since` until `until`.

    `times`, `in_flight`: from times[i] on so many rollouts were in flight (training and evaluation). `failed`: attempts by cause;
    `retried`: causes after which attempts were made again. `scored_after`: seconds from a group's last rollout until it was ready.
    `dropped`: groups by cause; `admitted`: groups. `evaluations`: rollouts of each. `engines_lost`, `resumes`: how often.
    """

    since: float
    until: float
    times: Floats
    in_flight: Floats
    rollouts: list[Attempted] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    syncs: list[Synced] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    retried: set[str] = field(default_factory=set)
    scored_after: list[float] = field(default_factory=list)
    ready: int = 0
    zero_advantage: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    admitted: int = 0
    replayed: int = 0
    evaluations: list[int] = field(default_factory=list)
    engines_lost: int = 0
    resumes: int = 0

    @property
    def mean_in_flight(self) -> float:
        """Rollouts in flight, on average over the window."""
        inside = np.concatenate([[self.since], self.times[(self.times > self.since) & (self.times < self.until)], [self.until]])
        counts = self.in_flight[np.searchsorted(self.times, inside[:-1], side="right") - 1]
        return float((counts * np.diff(inside)).sum() / max(self.until - self.since, 1e-9))


def trained_at(events: Iterable[AnyEvent]) -> dict[int, float]:
    """Return when each batch was trained, by its latest training; none of which the run has gone back behind, and not trained again."""
    times: dict[int, float] = {}
    for event in _in_running_time(events):
        if isinstance(event, BatchAcknowledged):
            times[event.k] = event.time
        elif isinstance(event, Resumed):
            times = {k: time for k, time in times.items() if k < event.version}
    return times


def _in_running_time(events: Iterable[AnyEvent]) -> Iterator[AnyEvent]:
    """Yield events with times that do not fall where the run is taken up, by whatever clock."""
    newest, behind = float("-inf"), 0.0
    for event in events:
        if isinstance(event, Resumed):
            behind = max(behind, newest - event.time)
        told: AnyEvent = msgspec.structs.replace(event, time=event.time + behind) if behind else event
        newest = max(newest, told.time)
        yield told


def acknowledged(events: Iterable[AnyEvent]) -> list[float]:
    """Return these times in order of the batches."""
    times = trained_at(events)
    return [times[k] for k in sorted(times)]


def observe(events: Iterable[AnyEvent], since: float, until: float) -> Observed:
    """Fold a journal. What lies at the edges of the window counts by its end. Raises ValueError when the history contradicts itself."""
    fold = _Fold(since, until)
    for event in _in_running_time(events):
        if event.time > until:
            break
        fold.take(event)
    return fold.observed()


class _Fold:
    def __init__(self, since: float, until: float) -> None:
        self._ledger = Ledger()
        self._times: list[float] = [float("-inf")]
        self._in_flight: list[float] = [0.0]
        self._evaluating = 0
        self._admitted: dict[int, float] = {}  # groups of this process; those that are not live any more too, until the next
        self._ended: dict[int, float] = {}  # when a group's latest member ended
        self._formed: dict[int, float] = {}  # by batch, in this process
        self._before = float("-inf")
        self._out = Observed(since, until, np.zeros(0), np.zeros(0))

    def observed(self) -> Observed:
        self._out.times, self._out.in_flight = np.array(self._times), np.array(self._in_flight)
        return self._out

    def take(self, event: AnyEvent) -> None:
        """Fold one event."""
        apply(self._ledger, event)
        out, inside = self._out, event.time >= self._out.since
        match event:
            case Admitted():
                self._admitted[event.group] = event.time
                out.admitted += inside
            case Finished() if event.group in self._admitted:
                self._finished(event, inside=inside)
            case RolloutDropped() if event.group in self._admitted:
                self._ended[event.group] = event.time
                if inside and not event.finished:
                    out.failed[event.cause] += 1
                    if not event.final:
                        out.retried.add(event.cause)
            case Ready() if event.group in self._admitted:
                if inside:
                    out.ready += 1
                    out.zero_advantage += event.zero_advantage
                    out.scored_after.append(event.time - self._ended.get(event.group, event.time))
                self._admitted.pop(event.group)
                self._ended.pop(event.group, None)
            case GroupDropped():
                out.dropped[event.cause] += inside
                if self._admitted.pop(event.group, None) is not None and event.cause == "zero_advantage" and inside:
                    out.ready += 1  # it was complete, and replaced instead (rollout.dynamic_sampling)
                    out.zero_advantage += 1
                self._ended.pop(event.group, None)
            case BatchFormed():
                self._formed[event.k] = event.time
            case BatchAcknowledged():
                formed = self._formed.pop(event.k, None)
                if formed is not None and formed <= event.time and inside:  # who takes a run up tells by files, or by another clock
                    out.trained.append(Trained(event.k, formed, event.time, self._before))
                self._before = event.time
            case Published() if event.engines and inside:
                out.syncs.append(Synced(event.time, len(event.engines), event.sync_engine_seconds / len(event.engines)))
            case EngineState(state="lost"):
                out.engines_lost += inside
            case EvalStarted():
                self._evaluating = event.rollouts
                out.evaluations.append(event.rollouts)
            case EvalFinished():
                self._evaluating = 0
            case Ingested():
                out.replayed += inside
            case Resumed():
                self._resumed()
                out.resumes += inside
            case Continued():
                self._admitted.pop(event.group, None)
            case _:
                pass  # says nothing of the world
        if (flying := float(self._ledger.rollouts_in_flight + self._evaluating)) != self._in_flight[-1]:
            self._times.append(max(event.time, self._times[-1]))
            self._in_flight.append(flying)

    def _finished(self, event: Finished, *, inside: bool) -> None:
        self._ended[event.group] = event.time
        start = self._admitted[event.group] if event.attempt == 0 else event.time - event.seconds
        if inside and event.sampled_tokens > 0:
            turns = max(1, event.turns)
            self._out.rollouts.append(Attempted(event.group, start, max(event.time, start), event.sampled_tokens, event.tokens, turns))

    def _resumed(self) -> None:
        self._admitted.clear()
        self._ended.clear()
        self._formed.clear()
        self._before = float("-inf")
        self._evaluating = 0


def batch_tokens(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return the tokens of each batch, all positions, by its row of metrics."""
    return {int(row["batch"]): float(row["tokens"]) for row in rows if "tokens" in row}
