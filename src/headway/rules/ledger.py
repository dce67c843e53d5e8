"""The ledger: the fold of the journal, and the only state that decisions read.

`apply(ledger, event)` is the one place where it changes: live, in recovery and in simulation. Capacity is a function of the *live sets*
(groups in flight, and complete groups not in a batch), never of lifetime counters, so a dropped group needs no repair: forgetting it is the
refund. Every event costs O(1), a formed batch O(its groups). Counts by cause are kept for reports only; no decision reads them.

An event about a group that is no longer live changes nothing: a rollout may become durable in the moment in which its group is cancelled.
An event about a group that was never admitted is an error in the history.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from headway.types import (
    Admitted,
    AnyEvent,
    BatchAcknowledged,
    BatchFormed,
    ConfigChanged,
    Draining,
    Ended,
    EngineState,
    EvalFinished,
    EvalStarted,
    Finished,
    GroupDropped,
    Published,
    Ready,
    Resumed,
    RolloutDropped,
    SourceExhausted,
)

REWARDS_KEPT = 1000  # batches whose mean reward is remembered, for finish_when


@dataclass(slots=True)
class Unit:
    """A live group: `ended` of its `members` rollouts have ended, `birth` is the version served at its admission."""

    prompt_id: str
    epoch: int
    birth: int
    members: int
    ended: int = 0


class LedgerView(Protocol):
    """What everyone but the recorder sees: the ledger, read only."""

    @property
    def version(self) -> int:
        """v: the version that every serving engine serves; -1 before the first publication."""
        ...

    @property
    def next_batch(self) -> int:
        """k: the batch that will be formed next."""
        ...

    @property
    def trained(self) -> int:
        """The newest version that the trainer has completed."""
        ...

    @property
    def running(self) -> Mapping[int, Unit]:
        """Groups in flight, by id: admitted and not yet scored."""
        ...

    @property
    def ready(self) -> Mapping[int, Unit]:
        """Complete, scored groups that no batch has taken."""
        ...

    @property
    def rollouts_in_flight(self) -> int:
        """Members of running groups that have not ended."""
        ...

    @property
    def next_group(self) -> int:
        """The id that the next admitted group gets."""
        ...

    @property
    def exhausted(self) -> bool:
        """Whether the prompt source has ended."""
        ...

    @property
    def requeued(self) -> Mapping[tuple[str, int], int]:
        """Prompts (id, epoch) that wait to be tried again, and how often they were requeued."""
        ...

    @property
    def waiting_prompts(self) -> int:
        """How many requeued prompts have not been admitted again."""
        ...

    @property
    def draining(self) -> str:
        """Why no further group is admitted; empty while the run goes on."""
        ...

    @property
    def barren(self) -> int:
        """Groups in a row of which none could train (dropped while running, not by the run itself, or ready without an advantage)."""
        ...

    @property
    def rewards(self) -> deque[tuple[int, float]]:
        """(batch, mean reward over all scored members) of the latest batches."""
        ...

    @property
    def eval_running(self) -> int | None:
        """The version under evaluation."""
        ...

    @property
    def last_eval(self) -> int:
        """The version that was evaluated last; -1: none."""
        ...

    @property
    def dropped(self) -> Mapping[str, int]:
        """Groups dropped, by cause (for reports)."""
        ...

    @property
    def lost(self) -> Mapping[str, int]:
        """Attempts lost, by cause (for reports)."""
        ...

    @property
    def last_loss(self) -> str:
        """Cause of the attempt that was lost last, and the first line of what is known of it (for reports)."""
        ...

    @property
    def alike(self) -> int:
        """How many of the `barren` groups were scored alike in all their members (for reports)."""
        ...

    @property
    def admitted(self) -> int:
        """Groups admitted by this ledger's history (for reports)."""
        ...

    @property
    def sampled_tokens(self) -> int:
        """Tokens of finished rollouts (for reports)."""
        ...


@dataclass(slots=True)
class Ledger:
    """The fold's accumulator; see `LedgerView` for what each field means."""

    version: int = -1
    next_batch: int = 0
    trained: int = 0
    running: dict[int, Unit] = field(default_factory=dict)
    ready: dict[int, Unit] = field(default_factory=dict)
    rollouts_in_flight: int = 0
    next_group: int = 0
    exhausted: bool = False
    requeued: dict[tuple[str, int], int] = field(default_factory=dict)
    waiting_prompts: int = 0
    draining: str = ""
    barren: int = 0
    rewards: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REWARDS_KEPT))
    eval_running: int | None = None
    last_eval: int = -1
    dropped: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    last_loss: str = ""
    alike: int = 0
    admitted: int = 0
    sampled_tokens: int = 0


def apply(ledger: Ledger, event: AnyEvent) -> None:
    """Fold one event into the ledger, in place. Raises ValueError when the history contradicts itself."""
    match event:
        case Admitted():
            _admitted(ledger, event)
        case Finished():
            ledger.sampled_tokens += event.sampled_tokens
            _member_ended(ledger, event.group)
        case RolloutDropped():
            ledger.lost[event.cause] += 1
            ledger.last_loss = f"{event.cause}: {event.detail.partition(chr(10))[0]}"
            if event.final and not event.finished:
                _member_ended(ledger, event.group)
        case Ready():
            unit = _take(ledger, ledger.running, event.group)
            if unit is not None:
                ledger.ready[event.group] = unit
                ledger.barren = ledger.barren + 1 if event.zero_advantage else 0
                ledger.alike = ledger.alike + 1 if event.zero_advantage else 0
        case GroupDropped():
            _group_dropped(ledger, event)
        case BatchFormed():
            _batch_formed(ledger, event)
        case BatchAcknowledged():
            if event.k >= ledger.next_batch:
                raise ValueError(f"batch {event.k} is acknowledged and was never formed: the next is {ledger.next_batch}")
            ledger.trained = max(ledger.trained, event.k + 1)
        case Published():
            ledger.version = max(ledger.version, event.version)
        case EvalStarted():
            ledger.eval_running = event.version
        case EvalFinished():
            ledger.eval_running = None
            ledger.last_eval = event.version
        case SourceExhausted():
            ledger.exhausted = True
        case Draining():
            ledger.draining = event.reason
        case Resumed():
            ledger.version, ledger.trained, ledger.next_batch = event.version, event.version, event.k
            ledger.draining = ""
            ledger.eval_running = None  # an evaluation that was cut short has not happened
        case EngineState() | ConfigChanged() | Ended():
            pass  # facts for readers; no decision depends on them
        case _:
            assert_never(event)


def _admitted(ledger: Ledger, event: Admitted) -> None:
    if event.group < ledger.next_group:
        raise ValueError(f"group {event.group} is admitted twice")
    ledger.next_group = event.group + 1
    ledger.running[event.group] = Unit(event.prompt_id, event.epoch, event.birth, event.members)
    ledger.rollouts_in_flight += event.members
    ledger.admitted += 1
    if ledger.waiting_prompts and (event.prompt_id, event.epoch) in ledger.requeued:
        ledger.waiting_prompts -= 1


def _member_ended(ledger: Ledger, group: int) -> None:
    unit = ledger.running.get(group)
    if unit is None:
        _known(ledger, group)
        return
    if unit.ended == unit.members:
        raise ValueError(f"group {group} has {unit.members} members, and one more has ended")
    unit.ended += 1
    ledger.rollouts_in_flight -= 1


def _take(ledger: Ledger, units: dict[int, Unit], group: int) -> Unit | None:
    unit = units.pop(group, None)
    if unit is None:
        _known(ledger, group)
    else:
        ledger.rollouts_in_flight -= unit.members - unit.ended
        unit.ended = unit.members
    return unit


def _known(ledger: Ledger, group: int) -> None:
    if group >= ledger.next_group:
        raise ValueError(f"group {group} was never admitted")


def _group_dropped(ledger: Ledger, event: GroupDropped) -> None:
    was_running = event.group in ledger.running
    unit = _take(ledger, ledger.running if was_running else ledger.ready, event.group)
    if unit is None:
        return
    ledger.dropped[event.cause] += 1
    if was_running and event.cause != "cancelled":  # a run that stops its own groups is not a broken environment
        ledger.barren += 1
    prompt = (unit.prompt_id, unit.epoch)
    if event.requeued:
        ledger.requeued[prompt] = ledger.requeued.get(prompt, 0) + 1
        ledger.waiting_prompts += 1
    else:
        ledger.requeued.pop(prompt, None)


def _batch_formed(ledger: Ledger, event: BatchFormed) -> None:
    if event.k != ledger.next_batch:
        raise ValueError(f"batch {event.k} is formed where batch {ledger.next_batch} is next")
    for group in event.groups:
        unit = ledger.ready.pop(group, None)
        if unit is None:
            raise ValueError(f"batch {event.k} holds group {group}, which is not ready")
        if ledger.requeued:
            ledger.requeued.pop((unit.prompt_id, unit.epoch), None)
    ledger.next_batch = event.k + 1
    ledger.rewards.append((event.k, event.reward_mean))
