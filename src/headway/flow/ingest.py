"""Ingest takes in groups that no engine of this run has written: replayed ones, from files, and external ones, that somebody posts.

A group first gets a place in a batch (from the gate), then its rollouts become durable, then the train sink has it. A place that was given
does not depend on whoever asked: who posts a group and hangs up has posted it all the same. Nothing is evicted: what is offered is
accepted or refused, and both are counted:

    submitted = accepted + refused (by reason) + offers that wait for a place
    accepted  = trained + dropped (with a cause, in the journal) + groups in line for a batch
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from headway.events import Ingested
from headway.flow.durable import MakeDurable
from headway.flow.watch import Watch
from headway.formats.offered import OfferedGroup
from headway.types import Admission, FinishedGroup, Prompt, Source

WAIT_SECONDS = 2.0  # for a place, before a request is told to come again
MOST_WAITING = 16  # requests at once: more are told so at once, and hold no memory
LONGEST_RETRY_SECONDS = 60

Refusal = Literal[
    "no slack",  # no batch can spare a live group: come again
    "busy",  # too many requests wait already: come again
    "not started",  # no version is served yet: come again
    "ending",  # the run drains or has ended
    "invalid",  # it cannot be read, or be trained on
    "too large",  # more than ingest.max_request_bytes
    "incomplete",  # the request did not arrive whole, or not in time
    "unauthorized",  # without the token
]


class Place(Protocol):
    """Waits for a place for a group in a batch and takes it."""

    def __call__(self, name: str, source: Source, members: int) -> Awaitable[Ingested | None]:
        """Return the place; None once the run drains."""
        ...


@dataclass(frozen=True, slots=True)
class Taken:
    """A group is durable under this id. `batch`: the one that it will be trained in; None: the sink dropped it, the journal says why."""

    group: int
    batch: int | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A group was not taken; `retry_seconds` after which it may be offered again, 0: no use."""

    reason: Refusal
    retry_seconds: int = 0


class Ingest:
    """Takes offered groups in. `run` plays the replay source, if there is one, and sees the groups that have a place to their ends.

    `replayed_at_once`: how many replayed groups are kept in hand, waiting for places. When a version opens places they are had at once or
    not at all, so this is how many of a batch a replay source gets.
    """

    def __init__(
        self,
        *,
        place: Place,
        commit: MakeDurable,
        take: Callable[[FinishedGroup], None],
        watch: Watch,
        replayed: AsyncIterable[OfferedGroup] | None = None,
        replayed_at_once: int = 1,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._place = place
        self._commit = commit
        self._take = take
        self._watch = watch
        self._replayed = replayed
        self._replayed_at_once = replayed_at_once
        self._wait_seconds = wait_seconds
        self._tasks: asyncio.TaskGroup | None = None  # while running: owns the groups that have a place
        self._ended = False
        self._published = 0.0  # when the version that is served now was, by the loop's clock
        self._waiting = 0  # requests
        self._submitted = 0
        self._accepted = 0
        self._refused: Counter[Refusal] = Counter()

    @property
    def counts(self) -> Mapping[str, Any]:
        """Groups so far, for the pipeline row: submitted, accepted, refused by reason; and those in line for a batch now."""
        return {
            "ingest_submitted": self._submitted,
            "ingest_accepted": self._accepted,
            "ingest_refused": dict(self._refused),
            "ingest_in_line": len(self._watch.now.ingested),
        }

    async def run(self) -> None:
        """Take groups in until the run drains. A damaged replay file is an error."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                if self._replayed is not None:
                    source, reading = aiter(self._replayed), asyncio.Lock()
                    for number in range(self._replayed_at_once):
                        tasks.create_task(self._replay(source, reading, tasks), name=f"replay {number}")
                await self._until_drained()
                self._ended = True  # from here on nobody gets a place; who has one is seen through
        finally:
            self._ended = True

    async def offer(self, group: OfferedGroup) -> Taken | Refused:
        """Take a posted group in, or say why not: at once, or after waiting a moment for a place."""
        self._submitted += 1
        unwelcome = self.unwelcome()
        if unwelcome is not None or self._tasks is None:
            return self._refuse(unwelcome or Refused("ending"))
        try:
            placed = await self._place_soon(group)
        except asyncio.CancelledError:
            self._refuse(Refused("ending"))
            raise
        if isinstance(placed, Refused):
            return self._refuse(placed)
        self._accepted += 1
        taking = self._tasks.create_task(self._take_in(placed, group), name=f"take in group {placed.group}")
        return await asyncio.shield(taking)  # whoever hangs up now has posted it all the same

    async def _place_soon(self, group: OfferedGroup) -> Ingested | Refused:
        self._waiting += 1
        try:
            async with asyncio.timeout(self._wait_seconds):
                return await self._place(group.name, group.source, len(group.rollouts)) or Refused("ending")
        except TimeoutError:
            return self._try_again("no slack")
        finally:
            self._waiting -= 1

    def unwelcome(self) -> Refused | None:
        """Return why a posted group would be refused at once, whatever is in it; None: it may be offered."""
        now = self._watch.now
        if now.draining or self._ended:
            return Refused("ending")
        if self._tasks is None or now.version < 0:
            return Refused("not started", 1)
        return self._try_again("busy") if self._waiting >= MOST_WAITING else None

    def refuse(self, refused: Refused) -> None:
        """Count a group that was refused before it could be offered."""
        self._submitted += 1
        self._refuse(refused)

    def _refuse(self, refused: Refused) -> Refused:
        self._refused[refused.reason] += 1
        return refused

    def _try_again(self, reason: Refusal) -> Refused:
        """Return a refusal that says when to come again: so as to wait here when the next version, if it comes as lately, opens places."""
        due = self._published + self._watch.now.cycle_seconds - asyncio.get_running_loop().time()
        return Refused(reason, min(LONGEST_RETRY_SECONDS, max(1, round(due - self._wait_seconds / 2))))

    async def _until_drained(self) -> None:
        now = self._watch.now
        while not now.draining:
            self._published = asyncio.get_running_loop().time()
            await self._until_after(now.version)

    async def _until_after(self, version: int) -> None:
        await self._watch.until(lambda now: now.version > version or bool(now.draining))

    async def _replay(self, source: AsyncIterator[OfferedGroup], reading: asyncio.Lock, tasks: asyncio.TaskGroup) -> None:
        while True:
            async with reading:
                group = await anext(source, None)
            if group is None:
                return
            self._submitted += 1
            placed = await self._place(group.name, group.source, len(group.rollouts))
            if placed is None:
                self._refuse(Refused("ending"))
                return
            self._accepted += 1
            await asyncio.shield(tasks.create_task(self._take_in(placed, group), name=f"take in group {placed.group}"))

    async def _take_in(self, placed: Ingested, group: OfferedGroup) -> Taken:
        """Make a group that has its place durable and hand it to the sink."""
        rollouts = tuple(msgspec.structs.replace(rollout, group=placed.group) for rollout in group.rollouts)
        durable = tuple(await asyncio.gather(*(self._commit(rollout) for rollout in rollouts)))
        self._take(FinishedGroup(Admission(placed.group, Prompt(group.name, 0, {}), len(rollouts), birth=-1), durable, lost=()))
        return Taken(placed.group, placed.k if placed.group in self._watch.now.ingested else None)
