"""The dispatcher starts groups as the gate lets them in, and sees every rollout to its one ending.

A group is admitted whole. Each member that finishes is durable before it counts. When all members have ended, the group goes on to the
scorer; when it cannot be trained any more whatever the others do (`rules.batching.doomed`), the others are cancelled and it is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from headway.events import AnyEvent, GroupDropped, RolloutDropped
from headway.flow.channels import Channel
from headway.flow.durable import Commit, finished_event
from headway.rules.batching import doomed
from headway.types import Admission, Cause, Failure, FinishedGroup, Prompt, Rollout


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
    dropped: bool = False


class Dispatcher:
    """Keeps as many groups in flight as the gate allows."""

    def __init__(
        self,
        *,
        prompts: AsyncIterable[Prompt],
        admit: Callable[[Prompt], Awaitable[Admission | None]],
        run_rollout: RunRollout,
        record: Callable[[AnyEvent], None],
        commit: Commit,
        finished: Channel[FinishedGroup],
        whole_groups_only: bool,
        clock: Callable[[], float],
    ) -> None:
        self._prompts = prompts
        self._admit = admit
        self._run_rollout = run_rollout
        self._record = record
        self._commit = commit
        self._finished = finished
        self._whole_groups_only = whole_groups_only
        self._clock = clock
        self._groups: dict[int, _Group] = {}

    def cancel_all(self, detail: str) -> None:
        """End every group in flight now, as cancelled; finished members stay in the journal."""
        for group in list(self._groups.values()):
            self._drop(group, "cancelled", detail)

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
            async for prompt in self._prompts:
                admission = await self._admit(prompt)
                if admission is None:
                    break
                group = _Group(admission)
                self._groups[admission.group] = group
                group.tasks = [tasks.create_task(self._member(group, member)) for member in range(admission.members)]
        self._finished.close()

    async def _member(self, group: _Group, member: int) -> None:
        admission = group.admission
        attempts = 0

        def on_retry(attempt: int, failure: Failure) -> None:
            nonlocal attempts
            attempts = attempt + 1
            self._record(self._lost(group, member, attempt, failure, final=False))

        result = await self._run_rollout(admission.prompt, group=admission.group, member=member, on_retry=on_retry)
        if isinstance(result, Rollout):
            await self._commit(finished_event(result, self._clock()), result)
            group.rollouts.append(result)
        else:
            group.lost.append(result.cause)
            self._record(self._lost(group, member, attempts, result, final=True))
            if not group.dropped and doomed(admission.members, len(group.lost), whole_groups_only=self._whole_groups_only):
                self._drop(group, "incomplete", f"lost {len(group.lost)} of {admission.members} members; the last: {result.cause}")
        if not group.dropped and len(group.rollouts) + len(group.lost) == admission.members:
            del self._groups[admission.group]
            group.rollouts.sort(key=lambda rollout: rollout.member)
            await self._finished.send(FinishedGroup(admission, tuple(group.rollouts), tuple(group.lost)))

    def _lost(self, group: _Group, member: int, attempt: int, failure: Failure, *, final: bool) -> RolloutDropped:
        return RolloutDropped(
            self._clock(), group.admission.group, member, attempt, failure.cause, failure.detail, failure.sampled_tokens, final
        )

    def _drop(self, group: _Group, cause: Cause, detail: str) -> None:
        self._stop(group)
        sampled = sum(rollout.sampled_tokens for rollout in group.rollouts)
        self._record(GroupDropped(self._clock(), group.admission.group, cause, detail, sampled))

    def _stop(self, group: _Group) -> None:
        group.dropped = True
        self._groups.pop(group.admission.group, None)
        current = asyncio.current_task()
        for task in group.tasks:
            if task is not current:
                task.cancel()
