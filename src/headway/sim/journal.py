"""A journal in memory, with a commit that takes virtual time; durable across runs of one process, so that recovery can be played."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from headway.errors import StorageError
from headway.events import AnyEvent, Finished
from headway.protocols import Entry
from headway.types import Rollout


class SimJournal:
    """`protocols.Journal` in memory. `events` is the history; `fails_at`: the number of entries after which nothing can be written.

    `keep_rollouts` False spares memory in long runs: then nothing can be read back.
    """

    def __init__(self, *, commit_seconds: float = 0.0, keep_rollouts: bool = True, fails_at: int | None = None) -> None:
        self.events: list[AnyEvent] = []
        self._commit_seconds = commit_seconds
        self._rollouts: dict[tuple[int, int], Rollout] | None = {} if keep_rollouts else None
        self._fails_at = fails_at

    async def append(self, entries: Sequence[Entry]) -> Sequence[AnyEvent]:
        """Take the commit's time, then hold the entries."""
        if self._commit_seconds:
            await asyncio.sleep(self._commit_seconds)
        if self._fails_at is not None and len(self.events) + len(entries) > self._fails_at:
            raise StorageError(f"the journal is full after {self._fails_at} entries, as the simulation's settings say")
        events = [entry.event for entry in entries]
        if self._rollouts is not None:
            self._rollouts.update(((entry.rollout.group, entry.rollout.member), entry.rollout) for entry in entries if entry.rollout)
        self.events.extend(events)
        return events

    def replay(self) -> Iterator[AnyEvent]:
        """Yield every event from the first."""
        return iter(self.events)

    async def read(self, event: AnyEvent) -> Rollout:
        """Return the rollout that a Finished event refers to; raises StorageError when none is kept."""
        rollout = (self._rollouts or {}).get((event.group, event.member)) if isinstance(event, Finished) else None
        if rollout is None:
            raise StorageError(f"no rollout is kept for {event}")
        return rollout

    async def close(self) -> None:
        """Keep everything: another run may go on from here."""
