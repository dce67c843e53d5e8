"""What counts as progress, and which stage is blocked when there is none.

A run moves when work changes its state: a group starts, is ready or dropped, a rollout finishes or is lost for good, a batch is formed or
trained, a version is published, an engine serves another one, an evaluation gets on. Attempts that fail and are tried again move nothing:
a run can be busy with them for ever.

When nothing moves, everybody waits for somebody. The stage to name is the one that holds work and does not hand it on; it is looked for
from the journal, which all wait for, by way of the trainer back to the prompts. Who holds no work waits for others and is never named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from headway.events import (
    Admitted,
    AnyEvent,
    BatchAcknowledged,
    BatchFormed,
    Continued,
    Draining,
    EngineState,
    EvalFinished,
    EvalStarted,
    Finished,
    GroupDropped,
    Ingested,
    PromptDropped,
    Published,
    Ready,
    Resumed,
    RolloutDropped,
    SourceExhausted,
)
from headway.rules.admission import GateLimits
from headway.rules.batching import can_form, trainer_waits_for
from headway.rules.scheduling import publication_due
from headway.rules.view import LedgerView

Stage = Literal[
    "event loop",
    "journal",
    "batch writing",
    "weight sync",
    "trainer",
    "scorer",
    "sink",
    "environment or engine",
    "evaluation",
    "prompts",
    "admission",
    "paused",
]

_MOVES = frozenset(
    {Admitted, Finished, Ingested, Ready, GroupDropped, BatchFormed, BatchAcknowledged, Published, EngineState, EvalStarted, EvalFinished}
    | {SourceExhausted, PromptDropped, Draining, Resumed, Continued}
)
OPEN_REASONS = frozenset(
    {"open", "staleness", "ready groups", "concurrency", "draining", "end of data", "not published", "replay's turn"}
)  # why the gate may be closed while the run is under way; any other reason is somebody's wish to wait


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be seen beside the ledger. Seconds of a stage: how long its longest call has been under way; 0: none is.

    `late_seconds`: how much later than planned the event loop let the look happen. `handed_over`: batches before this one were announced
    to the trainer by this process.
    """

    idle_seconds: float  # since anything moved
    late_seconds: float = 0.0
    journal_seconds: float = 0.0
    writing_seconds: float = 0.0
    scoring_seconds: float = 0.0
    syncing: bool = False
    scored_apart: bool = False
    publish_lag: int = 0
    publish_every: int = 1
    handed_over: int = 0
    eval_in_flight: int = 0
    finished_queue: int = 0
    batch_queue: int = 0
    capacity: int = 0
    capacity_reason: str = "open"
    engines: Mapping[str, str] = {}  # state and version, by name
    last_event: str = "none"


class Stall(msgspec.Struct, frozen=True):
    """The stage that is blocked, and by what one can tell."""

    stage: Stage
    detail: str


def moves(event: AnyEvent) -> bool:
    """Whether the run has moved by this."""
    return type(event) in _MOVES or (isinstance(event, RolloutDropped) and event.final)


def blocked_stage(ledger: LedgerView, limits: GateLimits, scene: Scene) -> Stall:
    """Return the stage that holds the others up, given that nothing has moved for a while; "paused" where nothing shall."""
    long = scene.idle_seconds / 2  # a call that began later is not what everybody has been waiting for
    if scene.late_seconds >= long:
        return Stall("event loop", f"it did not turn for {scene.late_seconds:.0f} s: something blocked it, see above")
    if scene.journal_seconds > 0 and scene.journal_seconds >= long:
        return Stall("journal", f"a write to disk has been under way for {scene.journal_seconds:.0f} s")
    if scene.writing_seconds > 0 and scene.writing_seconds >= long:
        return Stall("batch writing", f"batch {scene.handed_over} has been written for {scene.writing_seconds:.0f} s")
    if (stall := _behind_the_batches(ledger, scene)) is not None:
        return stall
    if (stall := _before_the_batches(ledger, limits, scene, long)) is not None:
        return stall
    return _at_the_start(ledger, scene)


def _behind_the_batches(ledger: LedgerView, scene: Scene) -> Stall | None:
    """Training and publication."""
    due = max(ledger.trained - scene.publish_lag, 0)
    if scene.syncing or ledger.version < 0:
        return Stall("weight sync", f"version {due} is not served by all engines")
    if ledger.version < due and (ledger.draining or publication_due(due, max(ledger.version, 0), scene.publish_every)):
        stage: Stage = "weight sync" if ledger.eval_running is None else "evaluation"
        return Stall(stage, f"version {due} is trained, and version {ledger.version} is served")
    if ledger.trained < scene.handed_over:
        return Stall("trainer", f"it has not made version {ledger.trained + 1} out of batch {ledger.trained}")
    if ledger.trained < ledger.next_batch:
        return Stall("sink", f"batch {ledger.trained} is formed and has not been handed on")
    return None


def _before_the_batches(ledger: LedgerView, limits: GateLimits, scene: Scene, long: float) -> Stall | None:
    """From a rollout's start to its batch."""
    ended = sum(unit.ended == unit.members for unit in ledger.running.values())
    if scene.scored_apart and (scene.scoring_seconds > 0 and scene.scoring_seconds >= long):
        return Stall("scorer", f"a call has been under way for {scene.scoring_seconds:.0f} s")
    if ended or scene.finished_queue:
        return Stall("scorer" if scene.scored_apart else "sink", f"{ended} groups have ended and are not ready")
    if can_form(ledger, limits):  # no batch is ahead of training, or it had been named: its lead is no reason
        return Stall("sink", f"batch {ledger.next_batch} could be formed and is not")
    if ledger.rollouts_in_flight:
        return Stall("environment or engine", f"{ledger.rollouts_in_flight} rollouts are in flight and none of them ends")
    if scene.eval_in_flight or ledger.eval_running is not None:
        return Stall("evaluation", f"{scene.eval_in_flight} of its rollouts are in flight and none of them ends")
    return None


def _at_the_start(ledger: LedgerView, scene: Scene) -> Stall:
    """Nothing is under way: why does nothing start?"""
    if scene.capacity_reason not in OPEN_REASONS:
        return Stall("paused", scene.capacity_reason)
    if scene.capacity > 0 and not ledger.draining:
        return Stall("prompts", "groups may start, and the source gives no prompt")
    return Stall("admission", f"no group may start: {scene.capacity_reason}")


def report(stall: Stall, ledger: LedgerView, limits: GateLimits, scene: Scene) -> str:
    """Return what is known of a stall, in one line."""
    engines = ", ".join(f"{name} {state}" for name, state in sorted(scene.engines.items())) or "none heard of"
    what = f"the run waits: {stall.detail}" if stall.stage == "paused" else f"stalled: {stall.stage}: {stall.detail}"
    evaluating = f" and {scene.eval_in_flight} of an evaluation" if scene.eval_in_flight else ""
    return (
        f"nothing has moved for {scene.idle_seconds:.0f} s; {what}; "
        f"in flight: {ledger.rollouts_in_flight} rollouts of {len(ledger.running)} groups{evaluating}; "
        f"queued: {scene.finished_queue} finished groups, {scene.batch_queue} batches; ready: {len(ledger.ready)} groups; "
        f"capacity: {scene.capacity} groups ({scene.capacity_reason}); "
        f"version {ledger.version}, trained {ledger.trained}, next batch {ledger.next_batch}; engines: {engines}; "
        f"last: {scene.last_event}; the trainer waits for {trainer_waits_for(ledger, limits)}"
    )
