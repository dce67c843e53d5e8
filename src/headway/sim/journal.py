"""A journal in memory, with a commit that takes virtual time; durable across runs of one process, so that recovery can be played."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence

import msgspec

from headway.errors import StorageError
from headway.events import AnyEvent
from headway.protocols import Entry
from headway.types import PayloadReference, Rollout


class SimJournal:
    """`protocols.Journal` in memory. `events` is the history; `fails_at`: the number of entries after which nothing can be written.

    `keep_rollouts` False spares memory in long runs: then nothing can be read back.
    """

    def __init__(self, *, commit_seconds: float = 0.0, keep_rollouts: bool = True, fails_at: int | None = None) -> None:
        self.events: list[AnyEvent] = []
        self._commit_seconds = commit_seconds
        self._rollouts: dict[int, Rollout] | None = {} if keep_rollouts else None  # by number
        self._stored = 0
        self._fails_at = fails_at

    async def append(self, entries: Sequence[Entry]) -> Sequence[AnyEvent]:
        """Take the commit's time, then hold the entries."""
        if self._commit_seconds:
            await asyncio.sleep(self._commit_seconds)
        if self._fails_at is not None and len(self.events) + len(entries) > self._fails_at:
            raise StorageError(f"the journal is full after {self._fails_at} entries, as the simulation's settings say")
        events = [entry.event for entry in entries] if self._rollouts is None else [self._with_reference(entry) for entry in entries]
        self.events.extend(events)
        return events

    def replay(self) -> Iterator[AnyEvent]:
        """Yield every event from the first."""
        return iter(self.events)

    async def read(self, reference: PayloadReference) -> Rollout:
        """Return the rollout that a reference names; raises StorageError when none is kept."""
        rollout = (self._rollouts or {}).get(reference.offset)
        if rollout is None:
            raise StorageError(f"no rollout is kept for {reference}")
        return rollout

    async def prune(self, needed: Collection[int]) -> None:
        """Forget the rollouts of groups that are not needed any more."""
        rollouts = self._rollouts or {}
        newest = max(needed, default=-1)
        for number in [number for number, rollout in rollouts.items() if rollout.group <= newest and rollout.group not in needed]:
            del rollouts[number]

    def _with_reference(self, entry: Entry) -> AnyEvent:
        if entry.rollout is None or self._rollouts is None:
            return entry.event
        self._stored += 1
        self._rollouts[self._stored] = entry.rollout
        reference = PayloadReference(1, self._stored, len(entry.rollout.payload), 0)
        return msgspec.structs.replace(entry.event, reference=reference)

    async def close(self) -> None:
        """Keep everything: another run may go on from here."""
