"""The dispatcher starts groups as the gate lets them in, and sees every rollout to its one ending.

A group is admitted whole. Each member that finishes is durable before it counts. When all members have ended, the group goes on to the
scorer; when it cannot be trained any more whatever the others do (`rules.batching.doomed`), the others are cancelled and it is dropped.

In a run that is taken up again, groups that were in flight go on first, with the members that had finished: they are admitted already.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Protocol

from headway.events import AnyEvent, GroupDropped, RolloutDropped
from headway.flow.channels import Channel
from headway.flow.durable import MakeDurable
from headway.flow.failed_groups import DropFailed
from headway.rules.batching import doomed
from headway.types import Admission, Cause, ContinuedGroup, Failure, FinishedGroup, Prompt, Rollout


class RunRollout(Protocol):
    """Brings one rollout of a group to its end."""

    def __call__(
        self, prompt: Prompt, *, group: int, member: int, on_retry: Callable[[int, Failure], None]
    ) -> Awaitable[Rollout | Failure]:
        """Return the rollout, or why there is none."""
        ...


@dataclass(slots=True, eq=False)
class _Group:
    admission: Admission
    rollouts: list[Rollout] = field(default_factory=list)
    lost: list[Cause] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    tries: dict[int, int] = field(default_factory=dict)  # by member, where there was more than one
    dropped: bool = False
    ended: frozenset[int] = frozenset()  # members that an earlier process saw to their ends


class Dispatcher:
    """Keeps as many groups in flight as the gate allows.

    `continued` and `unscored`: what a run that is taken up again begins with; the latter are complete but for their scores. Members that
    go on start at most `max_concurrent` at a time: an earlier process may have been allowed more.
    """

    def __init__(
        self,
        *,
        prompts: AsyncIterable[Prompt],
        admit: Callable[[Prompt], Awaitable[Admission | None]],
        run_rollout: RunRollout,
        record: Callable[[AnyEvent], None],
        commit: MakeDurable,
        finished: Channel[FinishedGroup],
        drop_failed: DropFailed,
        whole_groups_only: bool,
        max_concurrent: int,
        clock: Callable[[], float],
        continued: Sequence[ContinuedGroup] = (),
        unscored: Sequence[FinishedGroup] = (),
    ) -> None:
        self._prompts = prompts
        self._admit = admit
        self._run_rollout = run_rollout
        self._record = record
        self._commit = commit
        self._finished = finished
        self._drop_failed = drop_failed
        self._whole_groups_only = whole_groups_only
        self._clock = clock
        self._groups: dict[int, _Group] = {}
        self._unscored = [*unscored]
        self._slots = asyncio.Semaphore(max_concurrent)
        self._continued = [_begun(group) for group in continued]
        self._groups.update((group.admission.group, group) for group in self._continued)

    def cancel_all(self, detail: str) -> None:
        """End every group in flight now, as cancelled, once the run drains; what finished stays in the journal.

        The feed has ended with the drain: it is a later process of this run that tries the prompts again.
        """
        for group in list(self._groups.values()):
            self._stop(group)
            sampled = sum(rollout.sampled_tokens for rollout in group.rollouts)
            self._record(GroupDropped(self._clock(), group.admission.group, "cancelled", detail, sampled, requeued=True))

    def leave_all(self) -> None:
        """Stop every group in flight and leave it as it is: a later process of this run goes on with what has finished of it."""
        for group in list(self._groups.values()):
            self._stop(group)

    def cancel(self, number: int) -> Prompt | None:
        """Stop a running group that somebody else drops, and return its prompt; None: its members have all ended, and it was handed on."""
        group = self._groups.get(number)
        if group is None:
            return None
        self._stop(group)
        return group.admission.prompt

    async def run(self) -> None:
        """Admit and run groups until the prompts end or the run drains, then see those in flight to their ends."""
        async with asyncio.TaskGroup() as tasks:
            self._go_on(tasks)
            while self._unscored:
                await self._finished.send(self._unscored.pop(0))
            async for prompt in self._prompts:
                admission = await self._admit(prompt)
                if admission is None:
                    break
                self._start(_Group(admission), range(admission.members), tasks)
        self._finished.close()

    def _start(self, group: _Group, members: Iterable[int], tasks: asyncio.TaskGroup) -> None:
        self._groups[group.admission.group] = group
        group.tasks = [tasks.create_task(self._member(group, member)) for member in members]

    def _go_on(self, tasks: asyncio.TaskGroup) -> None:
        """Start what is missing of the groups that were in flight, but for those that somebody has stopped by now."""
        for begun in [group for group in self._continued if not group.dropped]:
            missing = [member for member in range(begun.admission.members) if member not in begun.ended]
            if self._doomed(begun):
                self._drop(begun)
            elif missing:
                self._start(begun, missing, tasks)
            else:
                del self._groups[begun.admission.group]
                self._unscored.append(_whole(begun))
        self._continued.clear()

    async def _member(self, group: _Group, member: int) -> None:
        result = await (self._in_turn(group, member) if group.ended else self._brought_to_its_end(group, member))
        if isinstance(result, Rollout):
            group.rollouts.append(await self._commit(result))
        else:
            group.lost.append(result.cause)
            self._record(self._lost(group, member, group.tries.get(member, 0), result, final=True))
            if not group.dropped and self._doomed(group):
                self._drop(group)
        if not group.dropped and len(group.rollouts) + len(group.lost) == group.admission.members:
            del self._groups[group.admission.group]
            await self._finished.send(_whole(group))

    async def _in_turn(self, group: _Group, member: int) -> Rollout | Failure:
        async with self._slots:
            return await self._brought_to_its_end(group, member)

    def _brought_to_its_end(self, group: _Group, member: int) -> Awaitable[Rollout | Failure]:
        admission = group.admission
        on_retry = partial(self._tried_again, group, member)
        return self._run_rollout(admission.prompt, group=admission.group, member=member, on_retry=on_retry)

    def _tried_again(self, group: _Group, member: int, attempt: int, failure: Failure) -> None:
        group.tries[member] = attempt + 1
        self._record(self._lost(group, member, attempt, failure, final=False))

    def _lost(self, group: _Group, member: int, attempt: int, failure: Failure, *, final: bool) -> RolloutDropped:
        return RolloutDropped(
            self._clock(), group.admission.group, member, attempt, failure.cause, failure.detail, failure.sampled_tokens, final
        )

    def _doomed(self, group: _Group) -> bool:
        return doomed(group.admission.members, len(group.lost), whole_groups_only=self._whole_groups_only)

    def _drop(self, group: _Group) -> None:
        self._stop(group)
        detail = f"lost {len(group.lost)} of {group.admission.members} members; the last: {group.lost[-1]}"
        self._drop_failed(group.admission, group.rollouts, group.lost, detail)

    def _stop(self, group: _Group) -> None:
        group.dropped = True
        self._groups.pop(group.admission.group, None)
        current = asyncio.current_task()
        for task in group.tasks:
            if task is not current:
                task.cancel()


def _begun(continued: ContinuedGroup) -> _Group:
    ended = frozenset(rollout.member for rollout in continued.rollouts) | continued.lost.keys()
    return _Group(continued.admission, [*continued.rollouts], [*continued.lost.values()], ended=ended)


def _whole(group: _Group) -> FinishedGroup:
    rollouts = sorted(group.rollouts, key=attrgetter("member"))
    return FinishedGroup(group.admission, tuple(rollouts), tuple(group.lost))
