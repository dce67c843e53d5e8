"""Payloads of finished rollouts: durable first, then in memory as long as they fit (`rules.payloads`), and read again when they do not.

A rollout without its payload is a stub: what decisions need, and where its record lies. A batch and a scorer get it whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import msgspec

from headway.errors import StorageError
from headway.events import Finished
from headway.flow.durable import Commit, finished_event
from headway.flow.watch import Watch
from headway.rules.payloads import stays_in_memory
from headway.types import PayloadReference, ReadyGroup, Rollout

READS_AT_ONCE = 8  # records that are read and decoded together, of all who ask: what is held twice for a moment is no more than these


class Payloads:
    """Makes rollouts durable, and loads what was left on disk."""

    def __init__(
        self,
        *,
        commit: Commit,
        read: Callable[[PayloadReference], Awaitable[Rollout]],
        watch: Watch,
        max_held_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._commit = commit
        self._read = read
        self._watch = watch
        self._max_held_bytes = max_held_bytes
        self._clock = clock
        self._reads = asyncio.Semaphore(READS_AT_ONCE)

    async def commit(self, rollout: Rollout) -> Rollout:
        """Make a finished rollout durable and return it with its reference; without its payload when memory holds enough of them."""
        written = await self._commit(finished_event(rollout, self._clock()), rollout)
        if not isinstance(written, Finished) or written.reference is None:  # the journal keeps no payloads: memory has the only one
            return rollout
        stays = stays_in_memory(self._watch.now, self._max_held_bytes)
        return msgspec.structs.replace(rollout, reference=written.reference, payload=rollout.payload if stays else b"")

    async def load(self, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        """Return the rollouts with their payloads. Rewards are those given: a scorer may have changed them since. Raises StorageError."""
        if all(map(_is_here, rollouts)):
            return tuple(rollouts)
        async with asyncio.TaskGroup() as tasks:
            loading = [tasks.create_task(self._whole(rollout)) for rollout in rollouts]
        return tuple(task.result() for task in loading)

    async def load_groups(self, groups: Sequence[ReadyGroup]) -> tuple[ReadyGroup, ...]:
        """Return the groups with their payloads."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if all(map(_is_here, rollouts)):
            return tuple(groups)
        whole = iter(await self.load(rollouts))
        return tuple(replace(group, rollouts=tuple(next(whole) for _ in group.rollouts)) for group in groups)

    async def _whole(self, stub: Rollout) -> Rollout:
        if stub.payload or stub.reference is None:
            return stub
        name = f"the record of group {stub.group}, member {stub.member}"
        async with self._reads:
            try:
                full = await self._read(stub.reference)
            except StorageError as error:
                raise StorageError(f"{name} cannot be read again: {error}") from error
        if (full.group, full.member, full.attempt) != (stub.group, stub.member, stub.attempt):
            found = f"group {full.group}, member {full.member}, attempt {full.attempt}"
            raise StorageError(f"{name}, attempt {stub.attempt}, is not where the journal says: there lies {found}")
        return msgspec.structs.replace(full, reward=stub.reward, rewards={**full.rewards, **stub.rewards}, reference=stub.reference)


def _is_here(rollout: Rollout) -> bool:
    """Whether memory has its payload, or nobody else has."""
    return bool(rollout.payload) or rollout.reference is None
