"""What a run that is taken up again goes on with. Line "resume" of STALENESS.md's algorithm, line 4 of its invariant.

    v = the newest complete version; k = the first batch id >= v without a valid persisted batch

There is no repair of counters: there are none. The plan says which live sets the run has, and capacity follows from these. It is pure and
takes plain values; whoever carries it out records, in one breath and in this order:

1. `Resumed(v, k, lineage)`. The fold then holds nothing in flight (`run = {}`): what was is remembered as interrupted, and counts nowhere.
   Batches from k on are dissolved there: their groups are ready again.
2. `Continued(group)` for each group of `continued`: it was in flight, and members of it had finished. They survive: only the others start
   again, under the group's old birth.
3. `GroupDropped(..., requeued=True)` for each group of `evicted` and `interrupted`: their prompts are tried again, before all others.

Then the ready and running groups of the ledger are those of `kept` and `continued`, and H(k) holds for them (wait and drop, enforced at
admission). A process that dies between the steps is no harm: the next plan evicts the same again, and interrupted groups stay remembered
until they go on or are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from headway.rules.admission import GateLimits
from headway.rules.deadlines import holds
from headway.rules.lineage import Line, belongs
from headway.rules.staleness import oldest_contributing
from headway.types import OnStale

EvictionReason = Literal["newer", "alien", "over age", "no room"]


class CompleteGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A complete, scored group: its birth, and the oldest (`head`) and newest (`tail`) stamp in it, written by weights of `lineage`."""

    group: int
    birth: int
    head: int
    tail: int
    lineage: str


class UnfinishedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was in flight: `finished` of its members are durable, the others were running or are lost.

    `head` / `tail`: the oldest / newest stamp in the finished ones (-1: there is none), written by weights of `lineage`.
    """

    group: int
    birth: int
    finished: int
    head: int
    tail: int
    lineage: str


class PersistedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Batch `k` as it was formed. `valid`: it lies on disk, whole. `newest`: the newest version in it.

    `max_staleness` and `on_stale` are those by which it was made. `groups`: its live groups, for the case that it is dissolved; those that
    the ledger no longer remembers are not among them.
    """

    k: int
    lineage: str
    newest: int
    valid: bool
    max_staleness: int
    on_stale: OnStale
    groups: tuple[CompleteGroup, ...] = ()


class Evicted(msgspec.Struct, frozen=True):
    """A complete group that the run cannot go on with."""

    group: int
    reason: EvictionReason
    detail: str


class ResumePlan(msgspec.Struct, frozen=True, kw_only=True):
    """With what a run goes on. All ids; `kept` and `continued` oldest birth first, batches ascending."""

    version: int
    k: int
    ship_again: tuple[int, ...]  # byte-identical: their groups stay consumed
    dissolved: tuple[int, ...]  # their groups are among `kept` and `evicted`
    kept: tuple[int, ...]
    continued: tuple[int, ...]  # in flight when the run ended, with members that had finished
    evicted: tuple[Evicted, ...]
    interrupted: tuple[int, ...]  # in flight when the run ended, and begun anew

    @property
    def requeued(self) -> tuple[int, ...]:
        """The groups whose prompts are tried again."""
        return (*self.interrupted, *(entry.group for entry in self.evicted))

    @property
    def counts(self) -> dict[EvictionReason, int]:
        """How many groups were evicted, by reason."""
        reasons = [entry.reason for entry in self.evicted]
        return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}


def resume_plan(
    *,
    version: int,
    line: Line,
    batches: Iterable[PersistedBatch],
    ready: Sequence[CompleteGroup],
    running: Iterable[UnfinishedGroup],
    limits: GateLimits,
    promised: Mapping[int, int] | None = None,
) -> ResumePlan:
    """Return the plan. `version`: the newest complete one; `ready`: complete groups in no batch; `running`: groups in flight.

    Complete groups come before unfinished ones of the same birth: they cost more to lose.

    `promised`: places that ready replayed and external groups keep, by batch (`LedgerView.promised`).
    """
    ahead = sorted((batch for batch in batches if batch.k >= version), key=lambda batch: batch.k)
    k = version
    for batch in ahead:
        if batch.k != k or not _ships_again(batch, version, line, limits):
            break
        k += 1
    loose = [group for batch in ahead if batch.k >= k for group in batch.groups]
    unfinished = sorted(running, key=lambda group: (group.birth, group.group))
    begun = [group for group in unfinished if group.finished]
    fit, evicted = _sorted_out([*ready, *loose, *begun], version, k, line, limits, promised or {})
    of_running = {group.group for group in begun}
    return ResumePlan(
        version=version,
        k=k,
        ship_again=tuple(batch.k for batch in ahead if batch.k < k),
        dissolved=tuple(batch.k for batch in ahead if batch.k >= k),
        kept=tuple(group for group in fit if group not in of_running),
        continued=tuple(group for group in fit if group in of_running),
        evicted=evicted,
        interrupted=tuple(group.group for group in unfinished if not group.finished),
    )


def _ships_again(batch: PersistedBatch, version: int, line: Line, limits: GateLimits) -> bool:
    """Whether the trainer may get the batch as it is.

    One of an ancestor's names the ancestor, and the trainer would refuse it; so it would one that was made by a looser bound than the run
    has now.
    """
    if not batch.valid or batch.lineage != line.lineage or batch.newest > version:
        return False
    if limits.on_stale == "train":
        return True
    return batch.on_stale != "train" and batch.max_staleness <= limits.max_staleness


def _sorted_out(
    groups: Sequence[CompleteGroup | UnfinishedGroup], version: int, k: int, line: Line, limits: GateLimits, promised: Mapping[int, int]
) -> tuple[tuple[int, ...], tuple[Evicted, ...]]:
    """Return who stays and who goes: taken in oldest birth first, each only if the run can still train on it."""
    kept: list[int] = []
    evicted: list[Evicted] = []
    births: dict[int, int] = {}
    for group in sorted(groups, key=lambda group: (group.birth, isinstance(group, UnfinishedGroup), group.group)):
        reason = _unfit(group, version, k, line, limits)
        if reason is None and limits.keeps_deadlines:
            before = births.get(group.birth, 0)
            births[group.birth] = before + 1
            if not holds(births, k, limits, promised):
                births = {birth: count for birth, count in {**births, group.birth: before}.items() if count}
                last = group.birth + limits.max_staleness
                reason = Evicted(
                    group.group, "no room", f"batches {k} to {last} have no room for one more group that is due by batch {last}"
                )
        if reason is None:
            kept.append(group.group)
        else:
            evicted.append(reason)
    return tuple(kept), tuple(evicted)


def _unfit(group: CompleteGroup | UnfinishedGroup, version: int, k: int, line: Line, limits: GateLimits) -> Evicted | None:
    """Say why no batch from k on may train on this group; None: one may. Stamps of other weights never survive, in any mode."""
    if not belongs(group.lineage, group.tail, line):
        return Evicted(group.group, "alien", f"its newest token is of {group.lineage}-{group.tail}, which is no version of {line.lineage}")
    if max(group.tail, group.birth) > version:
        return Evicted(group.group, "newer", f"its newest token is of version {group.tail}, and version {version} is the newest there is")
    oldest = oldest_contributing(k, limits.max_staleness)
    if (
        limits.on_stale == "mask" and isinstance(group, CompleteGroup) and group.tail < oldest
    ):  # what is unfinished has younger tokens to come
        return Evicted(group.group, "over age", f"its newest token is of version {group.tail}: {k - group.tail} versions old in batch {k}")
    if limits.on_stale in {"wait", "drop"} and group.birth < oldest:
        return Evicted(group.group, "over age", f"it was born at version {group.birth}: {k - group.birth} versions old in batch {k}")
    return None
