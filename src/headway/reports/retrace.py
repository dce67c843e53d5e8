"""`headway retrace`: a run's journal played again through the rules, event by event, up to a place where somebody wants to look.

The ledger is folded from the events alone, so the state at any of them is the state in which the run decided. Each event is held against
the rules before it is folded (`rules.verdict`); what they would not have done is a divergence: of a journal that was damaged or changed,
or of a headway that has other rules than the one that wrote it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from headway.errors import ConfigError
from headway.events import AnyEvent, BatchFormed, ConfigChanged, Published
from headway.reports.run_files import RunFiles
from headway.rules.admission import GateLimits, capacity, capacity_reason, limits_of, steps_ahead
from headway.rules.batching import trainer_waits_for
from headway.rules.ledger import Ledger, apply
from headway.rules.verdict import Judge

MOST_DIVERGENCES = 20  # that are kept; all are counted
_SHOWN = 8  # events before the place where it stopped
_RULED_BY = ("rollout.", "run.steps")


@dataclass(frozen=True, slots=True)
class Stop:
    """Where to stop: after so many `events`, or before batch `batch` is formed, or before version `version` is published. None: nowhere."""

    events: int | None = None
    batch: int | None = None
    version: int | None = None

    def before(self, number: int, event: AnyEvent) -> bool:
        """Whether to stop before this event, the `number`-th from 0."""
        if self.events is not None and number >= self.events:
            return True
        if self.batch is not None and isinstance(event, BatchFormed) and event.k >= self.batch:
            return True
        return self.version is not None and isinstance(event, Published) and event.version >= self.version


class Divergence(msgspec.Struct, frozen=True):
    """Event `number` (from 0) is not what the rules make of the events before it."""

    number: int
    event: str
    time: float
    said: str


class Told(msgspec.Struct, frozen=True):
    """An event as the report shows it: its number from 0, its kind, and its fields."""

    number: int
    event: str
    fields: Mapping[str, object]


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger where the report stopped. `running`, `ready`: live groups by birth. `capacity` None: that config is unknown."""

    version: int
    trained: int
    next_batch: int
    running: Mapping[int, int]
    ready: Mapping[int, int]
    rollouts_in_flight: int
    waiting_prompts: int
    draining: str
    steps_ahead: float | None
    capacity: int | None
    capacity_reason: str | None
    trainer_waits_for: str | None


class RetraceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `headway retrace` found. `events`: how many were played; `unjudged`: of them, those of a config that is no longer known.

    `next`: the event that it stopped before (None: the journal ends here); `before`: the last ones before it. `kinds`: events by kind.
    """

    run: str
    ended: bool
    events: int
    unjudged: int
    resumes: int
    kinds: Mapping[str, int]
    state: State
    before: Sequence[Told]
    next: Told | None
    divergences: Sequence[Divergence]
    diverged: int


@dataclass(slots=True)
class _Walk:
    ledger: Ledger = field(default_factory=Ledger)
    kinds: Counter[str] = field(default_factory=Counter)
    last: deque[Told] = field(default_factory=lambda: deque(maxlen=_SHOWN))
    divergences: list[Divergence] = field(default_factory=list)
    events: int = 0
    unjudged: int = 0
    diverged: int = 0
    next: Told | None = None

    def note(self, event: AnyEvent, said: str) -> None:
        self.diverged += 1
        if len(self.divergences) < MOST_DIVERGENCES:
            self.divergences.append(Divergence(self.events, _kind(event), event.time, said))


def retrace_report(run: RunFiles, stop: Stop = Stop()) -> RetraceReport:
    """Play the journal again. Raises StorageError when it is damaged, ConfigError when it is empty or has no such place."""
    known_from = _config_known_from(run.events())
    limits = limits_of(run.rollout, run.steps)
    judge, walk = Judge(None), _Walk()
    for event in run.events():
        if stop.before(walk.events, event):
            walk.next = _told(walk.events, event)
            break
        judge.limits = limits if walk.events >= known_from else None
        walk.unjudged += judge.limits is None
        if said := judge.divergence(walk.ledger, event):
            walk.note(event, said)
        try:
            apply(walk.ledger, event)
        except ValueError as error:
            walk.note(event, f"it contradicts what came before: {error}")
            walk.next = _told(walk.events, event)
            break
        walk.kinds[_kind(event)] += 1
        walk.last.append(_told(walk.events, event))
        walk.events += 1
    _check_stop(run, stop, walk)
    return RetraceReport(
        run=run.name,
        ended=run.info.ended is not None,
        events=walk.events,
        unjudged=walk.unjudged,
        resumes=walk.kinds["resumed"],
        kinds=dict(walk.kinds),
        state=_state(walk.ledger, limits if walk.events >= known_from else None),
        before=tuple(walk.last),
        next=walk.next,
        divergences=tuple(walk.divergences),
        diverged=walk.diverged,
    )


def _config_known_from(events: Iterator[AnyEvent]) -> int:
    """Return from which event on the config in the run directory is the one that was in force."""
    known = 0
    for number, event in enumerate(events):
        if isinstance(event, ConfigChanged) and any(key.startswith(_RULED_BY) for key in event.keys):
            known = number
    return known


def _check_stop(run: RunFiles, stop: Stop, walk: _Walk) -> None:
    if not walk.events and walk.next is None:
        raise ConfigError(f"{run.state}: the journal is empty: nothing has happened in this run yet")
    if walk.next is not None or walk.diverged:
        return
    if stop.batch is not None:
        raise ConfigError(f"{run.directory.path}: batch {stop.batch} was never formed: the last is {walk.ledger.next_batch - 1}")
    if stop.version is not None:
        raise ConfigError(f"{run.directory.path}: version {stop.version} was never published: the last is {walk.ledger.version}")
    if stop.events is not None and stop.events > walk.events:
        raise ConfigError(f"{run.directory.path}: the journal has {walk.events} events, not {stop.events}")


def _state(ledger: Ledger, limits: GateLimits | None) -> State:
    return State(
        version=ledger.version,
        trained=ledger.trained,
        next_batch=ledger.next_batch,
        running=dict(sorted(Counter(unit.birth for unit in ledger.running.values()).items())),
        ready=dict(sorted(ledger.ready_births.items())),
        rollouts_in_flight=ledger.rollouts_in_flight,
        waiting_prompts=len(ledger.waiting),
        draining=ledger.draining,
        steps_ahead=None if limits is None else steps_ahead(ledger, limits),
        capacity=None if limits is None else capacity(ledger, limits),
        capacity_reason=None if limits is None else capacity_reason(ledger, limits),
        trainer_waits_for=None if limits is None else trainer_waits_for(ledger, limits),
    )


def _told(number: int, event: AnyEvent) -> Told:
    fields = msgspec.to_builtins(event)
    return Told(number, fields.pop("event"), fields)


def _kind(event: AnyEvent) -> str:
    return str(event.__struct_config__.tag)
