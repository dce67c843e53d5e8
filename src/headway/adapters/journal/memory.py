"""A journal in memory, for simulations and tests: cheap per event, nothing encoded, gone with the process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.errors import StorageError
from headway.protocols import Entry
from headway.types import AnyEvent, Finished, Rollout


class MemoryJournal:
    """Keeps events as they come; `events` may be read at any time."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self._rollouts: dict[tuple[int, int], Rollout] = {}

    async def append(self, entries: Sequence[Entry]) -> Sequence[AnyEvent]:
        """Keep the entries and return their events."""
        written = [entry.event for entry in entries]
        self.events += written
        for entry in entries:
            if entry.rollout is not None:
                self._rollouts[entry.rollout.group, entry.rollout.member] = entry.rollout
        return written

    def replay(self) -> Iterator[AnyEvent]:
        """Yield every event from the first, in order."""
        return iter(self.events)

    async def read(self, event: AnyEvent) -> Rollout:
        """Return the rollout that a Finished event refers to; raises StorageError when there is none."""
        rollout = self._rollouts.get((event.group, event.member)) if isinstance(event, Finished) else None
        if rollout is None:
            raise StorageError(f"journal holds no rollout for {event!r}")
        return rollout

    async def close(self) -> None:
        """Nothing to release."""
