"""Takes an interrupted run up again: asks `rules.resume` what it goes on with, and records that before anything starts.

    history = await read_history(journal, lineage=first)     # then: which version is the newest, and is it on the same line?
    resumption = await take_up(journal, history, version=..., line=..., ...)

All that is decided is written in one go: BatchAcknowledged of batches that were trained and not acknowledged, Resumed, Continued,
GroupDropped and PromptDropped, ConfigChanged. A process that dies before has changed nothing; one that dies after is taken up the same way.
No payload is read: what stands for a rollout is made of events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from headway.errors import RunFailed
from headway.events import AnyEvent, BatchAcknowledged, ConfigChanged, Continued, GroupDropped, PromptDropped, Resumed
from headway.flow.history import GroupRecord, History, read_history
from headway.flow.resumption import Prompts, Resumption, continued_group, finished_group, ready_group
from headway.flow.user_functions import Advantages
from headway.protocols import Entry, Journal, PromptSource
from headway.rules.admission import GateLimits
from headway.rules.ledger import TRAINED_KEPT, Ledger
from headway.rules.lineage import Line
from headway.rules.resume import CompleteGroup, EvictionReason, PersistedBatch, ResumePlan, UnfinishedGroup, resume_plan
from headway.types import Cause, OnStale

__all__ = ["History", "Resumption", "StoredBatch", "check_version", "read_history", "take_up"]

_CAUSES: Mapping[EvictionReason, Cause] = {"newer": "lineage", "alien": "lineage", "over age": "stale", "no room": "stale"}
_GONE = "the prompt source no longer has it"


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that lies whole where batches are kept: whose it is, by which bound it was made, and its metrics row."""

    lineage: str
    max_staleness: int
    on_stale: OnStale
    row: Mapping[str, Any]


async def take_up(
    journal: Journal,
    history: History,
    *,
    version: int,
    line: Line,
    limits: GateLimits,
    prompts: PromptSource,
    stored: Callable[[int], StoredBatch | None],
    advantages: Advantages,
    clock: Callable[[], float],
    trained_at: Callable[[int], float | None] = lambda _: None,
    changed: Sequence[str] = (),
    keeps: int = TRAINED_KEPT,
) -> Resumption:
    """Decide what the run goes on with, and record it. Once it returns, everything is durable.

    `version`: the newest complete one that `line` has; below `history.ledger.trained` it must be a new line. `stored` tells of batch k,
    None: it does not lie there whole. `trained_at` tells when a version became complete (Unix seconds). `changed`: keys of the config.
    `keeps`: trained batches whose payloads are kept (`run.keep_payloads`).

    Raises RunFailed when journal and weights do not go together, StorageError, PromptError.
    """
    check_version(history, version, keeps)
    now, ledger = clock(), history.ledger
    written: list[AnyEvent] = []

    def record(events: Iterator[AnyEvent]) -> None:
        for event in events:
            history.apply(event)
            written.append(event)

    record(BatchAcknowledged(trained_at(k + 1) or now, k) for k in range(ledger.trained, version))
    batches = _batches(history, version, stored)
    plan = resume_plan(
        version=version,
        line=line,
        batches=[batch for batch, _ in batches],
        ready=[_complete(group, history) for group in ledger.ready],
        running=[_unfinished(group, history) for group in (*ledger.interrupted, *ledger.running)],
        limits=limits,
        promised=_promised(ledger, version),
    )
    found = await _found(history, plan, prompts)
    record(iter([Resumed(now, plan.version, plan.k, line.lineage)]))
    continued = [group for group in plan.continued if _can_go_on(history.groups[group], found)]
    record(Continued(now, group) for group in continued)
    record(_dropped(history, plan, continued, now))
    record(_missing(ledger, found, now))
    if changed:
        record(iter([ConfigChanged(now, tuple(changed))]))
    await journal.append([Entry(event) for event in written])
    again = [(batch.k, row) for batch, row in batches if batch.k < plan.k]
    return _resumption(history, plan, continued, found, again, advantages)


def _resumption(
    history: History,
    plan: ResumePlan,
    continued: Sequence[int],
    found: Prompts,
    shipped_again: Sequence[tuple[int, Mapping[str, Any]]],
    advantages: Advantages,
) -> Resumption:
    """Return what the components begin with, once all that was decided is in the journal and in the ledger."""
    ledger = history.ledger
    ready = [ready_group(group, history.groups[group], found, advantages) for group in (*plan.kept, *ledger.ingested)]
    over = {group for group in continued if _has_ended(history.groups[group])}
    return Resumption(
        ledger=ledger,
        ready=ready,
        unscored=[finished_group(group, history.groups[group], found) for group in continued if group in over],
        continued=[continued_group(group, history.groups[group], found) for group in continued if group not in over],
        shipped_again=shipped_again,
        position=history.consumed.position(ledger),
        replayed=+history.replayed,
        plan=plan,
    )


async def _found(history: History, plan: ResumePlan, prompts: PromptSource) -> Prompts:
    """Return the prompts of all that is live or waits, as far as the source still has them."""
    records = (history.groups[group] for group in (*plan.kept, *plan.continued, *plan.requeued))
    wanted = {(record.prompt_id, record.epoch) for record in records} | history.ledger.waiting.keys()
    return await prompts.find(wanted) if wanted else {}


def check_version(history: History, version: int, keeps: int = TRAINED_KEPT) -> None:
    """Raise RunFailed when a run with this journal cannot go on from these weights (`take_up`): to be asked before anything is changed."""
    ledger, back = history.ledger, min(keeps, TRAINED_KEPT)
    remedy = f"start a new run with model.path = the weights of version {version}"
    if version > ledger.next_batch:
        raise RunFailed(
            f"the weights are at version {version}, and the journal knows of {ledger.next_batch} batches: it is another run's, or an "
            f"older copy: restore run.state_directory, or {remedy}"
        )
    if version < history.furthest - back:  # not of `ledger.trained`: a run that has gone back once has no older rollouts for it
        raise RunFailed(
            f"the newest weights are of version {version}, and {history.furthest} batches were trained: a run can go back by "
            f"{back} at most: restore newer weights, or {remedy}"
        )


def _batches(history: History, version: int, stored: Callable[[int], StoredBatch | None]) -> list[tuple[PersistedBatch, Mapping[str, Any]]]:
    """Return the batches that were formed and not trained, ascending, with the metrics rows of those that lie there whole."""
    found: list[tuple[PersistedBatch, Mapping[str, Any]]] = []
    for k, formed in sorted(history.ledger.formed.items()):
        if k < version:
            continue
        batch = stored(k)
        groups = tuple(_complete(group, history) for group in formed.units)
        persisted = PersistedBatch(
            k=k,
            lineage=batch.lineage if batch else "",
            newest=max((group.tail for group in groups), default=0),
            valid=batch is not None,
            max_staleness=batch.max_staleness if batch else 0,
            on_stale=batch.on_stale if batch else "mask",
            groups=groups,
        )
        found.append((persisted, batch.row if batch else {}))
    return found


def _promised(ledger: Ledger, version: int) -> Mapping[int, int]:
    """Return the places that replayed and external groups keep, by batch."""
    held = Counter(promise.k for promise in ledger.ingested.values() if promise.ready)
    held.update(promise.k for k, formed in ledger.formed.items() if k >= version for promise in formed.promised.values())
    return held


def _complete(group: int, history: History) -> CompleteGroup:
    record = history.groups[group]
    tail = record.tail
    return CompleteGroup(group=group, birth=record.birth, head=record.head, tail=tail, lineage=history.maker(tail))


def _unfinished(group: int, history: History) -> UnfinishedGroup:
    record = history.groups[group]
    finished, tail = len(record.finished), record.tail
    return UnfinishedGroup(group=group, birth=record.birth, finished=finished, head=record.head, tail=tail, lineage=history.maker(tail))


def _has_ended(record: GroupRecord) -> bool:
    return len(record.finished) + len(record.lost) >= record.members


def _can_go_on(record: GroupRecord, found: Prompts) -> bool:
    """Whether there is a prompt to go on with; a group that has all its rewards needs none."""
    scored = _has_ended(record) and all(event.reward is not None for event in record.finished.values())
    return scored or (record.prompt_id, record.epoch) in found


def _dropped(history: History, plan: ResumePlan, continued: Sequence[int], now: float) -> Iterator[AnyEvent]:
    """Yield the drops of all that does not go on; what is in `continued` does."""
    causes: dict[int, tuple[Cause, str, bool]] = {entry.group: (_CAUSES[entry.reason], entry.detail, True) for entry in plan.evicted}
    causes |= dict.fromkeys(plan.interrupted, ("interrupted", "in flight when the process ended", True))
    without = set(plan.continued).difference(continued)
    causes |= dict.fromkeys(without, ("interrupted", f"in flight when the process ended, and {_GONE}", False))
    for group, (cause, detail, requeued) in causes.items():
        record = history.groups[group]
        sampled = sum(event.sampled_tokens for event in record.finished.values())
        yield GroupDropped(now, group, cause, detail, sampled, requeued)
        if group in without:
            yield PromptDropped(now, record.prompt_id, record.epoch, "missing", _GONE)


def _missing(ledger: Ledger, found: Prompts, now: float) -> Iterator[AnyEvent]:
    for prompt_id, epoch in [prompt for prompt in ledger.waiting if prompt not in found]:
        yield PromptDropped(now, prompt_id, epoch, "missing", _GONE)
