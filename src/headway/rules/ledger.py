"""The ledger: the fold of the journal, and the only state that decisions read.

`apply(ledger, event)` is the one place where it changes: live, in recovery and in simulation. Capacity is a function of the *live sets*
(groups in flight, and complete groups not in a batch), never of lifetime counters, so a dropped group needs no repair: forgetting it is the
refund. Every event costs O(1), a formed batch O(its groups). Counts by cause are kept for reports only; no decision reads them.

Lines 2 and 6 of STALENESS.md's invariant rest on it: a finish leaves N(d) as it is, a loss lowers it, and empty sets are full capacity.

Live groups are also counted by birth, which is all that the bound on them needs (`rules.deadlines`): its decisions cost O(max_staleness).
Groups that came from elsewhere (`Ingested`) are no live groups: they hold a place in the batch that they were promised.

A run that is taken up again (`Resumed`) has nothing in flight: what was is interrupted, outside of all live sets, until a GroupDropped says
what becomes of its prompt. Batches from the resumed k on are dissolved: their groups are ready again, as far as they are remembered
(`rules.resume` says which of them stay). An interrupted group that goes on (`Continued`) is live again, with the members that had ended.

An event about a group that is no longer live changes nothing: a rollout may become durable in the moment in which its group is cancelled.
An event about a group that was never admitted is an error in the history.
"""

from __future__ import annotations

from typing import assert_never

from headway.events import (
    Admitted,
    AnyEvent,
    BatchAcknowledged,
    BatchFormed,
    ConfigChanged,
    Continued,
    Draining,
    Ended,
    EngineState,
    EvalFinished,
    EvalStarted,
    Finished,
    GroupDropped,
    Ingested,
    PaceChanged,
    PromptDropped,
    Published,
    Ready,
    Resumed,
    RolloutDropped,
    SourceExhausted,
)
from headway.rules.ledger_state import REWARDS_KEPT, Formed, Ledger
from headway.rules.view import Promise, ResumeBudget, Unit

__all__ = ["REWARDS_KEPT", "TRAINED_KEPT", "Formed", "Ledger", "apply"]

LATENCIES_AVERAGED = 256  # groups, about, that the mean latency looks back on
CYCLES_AVERAGED = 16  # batches, about, that the mean cycle looks back on
TRAINED_KEPT = 16  # trained batches whose groups are remembered: training may go back that far without losing them
_BY_A_CRASH = frozenset({"interrupted", "lineage"})
_BY_THE_RUN = frozenset({"cancelled", "stale"}) | _BY_A_CRASH  # a run that stops its own groups is not a broken environment
_NO_TRY = frozenset({"cancelled"}) | _BY_A_CRASH


def apply(ledger: Ledger, event: AnyEvent) -> None:
    """Fold one event into the ledger, in place. Raises ValueError when the history contradicts itself."""
    match event:
        case Admitted():
            _admitted(ledger, event)
        case Finished():
            _finished(ledger, event)
        case Ready():
            _ready(ledger, event)
        case Ingested():
            _ingested(ledger, event)
        case RolloutDropped():
            ledger.lost[event.cause] += 1
            ledger.last_loss = f"{event.cause}: {event.detail.partition(chr(10))[0]}"
            if event.final and not event.finished:
                _member_ended(ledger, event.group)
        case GroupDropped():
            _group_dropped(ledger, event)
        case BatchFormed():
            _batch_formed(ledger, event)
        case BatchAcknowledged():
            _acknowledged(ledger, event)
        case Published():
            ledger.version = max(ledger.version, event.version)
            if ledger.resume_budget is not None and event.version > ledger.resume_budget.version:
                ledger.resume_budget = None
        case PaceChanged():
            ledger.steps_ahead = event.steps_ahead
        case EvalStarted():
            ledger.eval_running = event.version
        case EvalFinished():
            ledger.eval_running = None
            ledger.last_eval = event.version
            ledger.repeated_eval = None
        case SourceExhausted():
            ledger.exhausted = True
        case Draining():
            ledger.draining = event.reason
        case Resumed():
            _resumed(ledger, event)
        case Continued():
            _continued(ledger, event)
        case PromptDropped():
            _prompt_dropped(ledger, event)
        case EngineState() | ConfigChanged() | Ended():
            pass  # facts for readers; no decision depends on them
        case _:
            assert_never(event)


def _admitted(ledger: Ledger, event: Admitted) -> None:
    _new_group(ledger, event.group)
    tries = ledger.waiting.get((event.prompt_id, event.epoch), 0) if ledger.waiting else 0
    ledger.running[event.group] = Unit(event.prompt_id, event.epoch, event.birth, event.members, admitted=event.time, tries=tries)
    _count(ledger.births, event.birth, 1)
    ledger.rollouts_in_flight += event.members
    ledger.admitted += 1
    if ledger.waiting:
        ledger.waiting.pop((event.prompt_id, event.epoch), None)
    if ledger.resume_budget is not None:
        ledger.resume_budget.admitted += 1


def _ingested(ledger: Ledger, event: Ingested) -> None:
    _new_group(ledger, event.group)
    if event.k < ledger.next_batch:
        raise ValueError(f"group {event.group} is promised to batch {event.k}, which was formed already")
    ledger.ingested[event.group] = Promise(event.k)
    _count(ledger.promised, event.k, 1)
    _count(ledger.awaited, event.k, 1)


def _new_group(ledger: Ledger, group: int) -> None:
    if group < ledger.next_group:
        raise ValueError(f"group {group} is admitted twice")
    ledger.next_group = group + 1


def _finished(ledger: Ledger, event: Finished) -> None:
    if (promise := ledger.ingested.get(event.group)) is not None:
        promise.size += event.size
        ledger.held_size += event.size
        return
    ledger.sampled_tokens += event.sampled_tokens
    unit = _member_ended(ledger, event.group)
    if unit is not None:
        unit.tokens += event.tokens
        unit.sampled_tokens += event.sampled_tokens
        unit.size += event.size
        ledger.held_size += event.size


def _member_ended(ledger: Ledger, group: int) -> Unit | None:
    unit = ledger.running.get(group)
    if unit is None:
        _known(ledger, group)
        return None
    if unit.ended == unit.members:
        raise ValueError(f"group {group} has {unit.members} members, and one more has ended")
    unit.ended += 1
    ledger.rollouts_in_flight -= 1
    return unit


def _ready(ledger: Ledger, event: Ready) -> None:
    promise = ledger.ingested.get(event.group)
    if promise is not None:
        if not promise.ready:
            promise.ready = True
            _count(ledger.awaited, promise.k, -1)
        return
    unit = ledger.running.pop(event.group, None)
    if unit is None:
        _known(ledger, event.group)
        return
    ledger.rollouts_in_flight -= unit.members - unit.ended
    unit.ended = unit.members
    ledger.failures.pop(unit.prompt_id, None)
    ledger.failed_in_row = 0
    _to_ready(ledger, event.group, unit)
    ledger.barren = ledger.barren + 1 if event.zero_advantage else 0
    ledger.alike = ledger.alike + 1 if event.zero_advantage else 0
    ledger.latencies = min(ledger.latencies + 1, LATENCIES_AVERAGED)
    ledger.latency_seconds += (event.time - unit.admitted - ledger.latency_seconds) / ledger.latencies


def _acknowledged(ledger: Ledger, event: BatchAcknowledged) -> None:
    if event.k >= ledger.next_batch:
        raise ValueError(f"batch {event.k} is acknowledged and was never formed: the next is {ledger.next_batch}")
    ledger.trained = max(ledger.trained, event.k + 1)
    if ledger.acknowledged is not None:
        ledger.cycles = min(ledger.cycles + 1, CYCLES_AVERAGED)
        ledger.cycle_seconds += (event.time - ledger.acknowledged - ledger.cycle_seconds) / ledger.cycles
    ledger.acknowledged = event.time
    while ledger.formed and (oldest := next(iter(ledger.formed))) < ledger.trained - TRAINED_KEPT:
        del ledger.formed[oldest]


def _known(ledger: Ledger, group: int) -> None:
    if group >= ledger.next_group:
        raise ValueError(f"group {group} was never admitted")


def _count(counts: dict[int, int], key: int, change: int) -> None:
    counts[key] = counts.get(key, 0) + change
    if not counts[key]:
        del counts[key]


def _forget(ledger: Ledger, group: int) -> Unit | None:
    """Take a live group out of the sets: this is the refund."""
    unit = ledger.running.pop(group, None)
    if unit is not None:
        ledger.rollouts_in_flight -= unit.members - unit.ended
    else:
        unit = _from_ready(ledger, group)
        if unit is None:
            return None
    _count(ledger.births, unit.birth, -1)
    ledger.held_size -= unit.size
    return unit


def _to_ready(ledger: Ledger, group: int, unit: Unit) -> None:
    ledger.ready[group] = unit
    _count(ledger.ready_births, unit.birth, 1)
    ledger.ready_tokens += unit.tokens
    ledger.ready_size += unit.size


def _from_ready(ledger: Ledger, group: int) -> Unit | None:
    unit = ledger.ready.pop(group, None)
    if unit is not None:
        _count(ledger.ready_births, unit.birth, -1)
        ledger.ready_tokens -= unit.tokens
        ledger.ready_size -= unit.size
    return unit


def _group_dropped(ledger: Ledger, event: GroupDropped) -> None:
    if event.group in ledger.ingested:
        _forget_promise(ledger, event.group)
        ledger.dropped[event.cause] += 1
        return
    was_running = event.group in ledger.running
    unit = ledger.interrupted.pop(event.group, None) or _forget(ledger, event.group)
    if unit is None:
        _known(ledger, event.group)
        return
    ledger.dropped[event.cause] += 1
    if was_running and event.cause not in _BY_THE_RUN:
        ledger.barren += 1
    if event.cause == "incomplete":
        ledger.failures[unit.prompt_id] = ledger.failures.get(unit.prompt_id, 0) + 1
        ledger.failed_in_row += 1
    if ledger.resume_budget is not None and event.group >= ledger.resume_budget.first_group:
        ledger.resume_budget.admitted -= 1
    prompt = (unit.prompt_id, unit.epoch)
    if event.requeued and unit.prompt_id not in ledger.quarantined:
        ledger.waiting[prompt] = unit.tries + 1
        if event.cause not in _NO_TRY:
            ledger.requeued[prompt] = ledger.requeued.get(prompt, 0) + 1
    else:
        ledger.requeued.pop(prompt, None)


def _forget_promise(ledger: Ledger, group: int) -> None:
    promise = ledger.ingested.pop(group)
    _count(ledger.promised, promise.k, -1)
    ledger.held_size -= promise.size
    if not promise.ready:
        _count(ledger.awaited, promise.k, -1)


def _batch_formed(ledger: Ledger, event: BatchFormed) -> None:
    k = event.k
    if k != ledger.next_batch:
        raise ValueError(f"batch {k} is formed where batch {ledger.next_batch} is next")
    formed = Formed()
    for group in event.groups:
        promise = ledger.ingested.get(group)
        if promise is not None and promise.ready:
            _forget_promise(ledger, group)
            formed.promised[group] = promise
            continue
        unit = _from_ready(ledger, group)
        if unit is None:
            raise ValueError(f"batch {k} holds group {group}, which is not ready")
        _count(ledger.births, unit.birth, -1)
        ledger.held_size -= unit.size
        formed.units[group] = unit
        if ledger.requeued:
            ledger.requeued.pop((unit.prompt_id, unit.epoch), None)
    if k in ledger.promised:
        raise ValueError(f"batch {k} is formed without {ledger.promised[k]} of the groups that it was promised to")
    ledger.formed[k] = formed
    if ledger.resume_budget is not None:
        ledger.resume_budget.taken += len(formed.units)
    ledger.next_batch = k + 1
    ledger.rewards.append((k, event.reward_mean))


def _resumed(ledger: Ledger, event: Resumed) -> None:
    for group, unit in ledger.running.items():
        _count(ledger.births, unit.birth, -1)
        ledger.held_size -= unit.size
        ledger.interrupted[group] = unit
    ledger.running.clear()
    ledger.rollouts_in_flight = 0
    for group, promise in [*ledger.ingested.items()]:
        if not promise.ready or promise.k < event.k:  # its sender has had no answer, or its batch is past
            _forget_promise(ledger, group)
            ledger.dropped["interrupted"] += 1
    for k in [k for k in ledger.formed if k >= event.k]:
        _dissolve(ledger, ledger.formed.pop(k))
    while ledger.rewards and ledger.rewards[-1][0] >= event.k:
        ledger.rewards.pop()
    ledger.version, ledger.trained, ledger.next_batch = event.version, event.version, event.k
    ledger.draining = ""
    ledger.steps_ahead = None  # chosen under a config that may have changed
    ledger.acknowledged = None  # the time between was no cycle
    ledger.repeated_eval = ledger.eval_running if ledger.eval_running is not None else ledger.repeated_eval
    ledger.eval_running = None  # an evaluation that was cut short has not happened
    ledger.last_eval = min(ledger.last_eval, event.version)  # where training goes back, what is made anew is evaluated anew
    ledger.exhausted = False  # the source may have more by now, and says so again
    ledger.barren = ledger.alike = ledger.failed_in_row = 0
    ledger.resume_budget = ResumeBudget(event.version, event.k, ledger.next_group)


def _continued(ledger: Ledger, event: Continued) -> None:
    unit = ledger.interrupted.pop(event.group, None)
    if unit is None:
        raise ValueError(f"group {event.group} goes on, and was not interrupted")
    unit.admitted = event.time  # the time in which no process ran is nobody's latency
    ledger.running[event.group] = unit
    _count(ledger.births, unit.birth, 1)
    ledger.held_size += unit.size
    ledger.rollouts_in_flight += unit.members - unit.ended


def _prompt_dropped(ledger: Ledger, event: PromptDropped) -> None:
    gone = [(event.prompt_id, event.epoch)]
    ledger.failures.pop(event.prompt_id, None)
    if event.cause == "quarantined":
        ledger.quarantined[event.prompt_id] = event.detail
        gone = [prompt for prompt in {**ledger.waiting, **ledger.requeued} if prompt[0] == event.prompt_id]  # of any epoch
    for prompt in gone:
        ledger.waiting.pop(prompt, None)
        ledger.requeued.pop(prompt, None)


def _dissolve(ledger: Ledger, formed: Formed) -> None:
    for group, unit in formed.units.items():
        _to_ready(ledger, group, unit)
        _count(ledger.births, unit.birth, 1)
        ledger.held_size += unit.size
    for group, promise in formed.promised.items():
        ledger.ingested[group] = promise
        ledger.held_size += promise.size
        _count(ledger.promised, promise.k, 1)
