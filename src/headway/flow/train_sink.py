"""The train sink turns scored groups into batches: advantages over all scored members, filters, then exactly the groups that a batch takes.

A group that may train is recorded as ready and kept. When the next batch is formed and of what is for `rules.batching` to say: the oldest
births first, by `rollout.on_stale`. With "mask", groups without a token young enough are dropped as stale before and their prompts tried
again; with "drop", so are the running groups that would hold a later batch up; with "wait" the batch waits for them. A batch none of whose
groups can move the policy is never shipped: its groups are dropped as zero-advantage.

Replayed and external groups come in by `take_ingested`; each is in the batch that it was promised to. Payloads that were left on disk are
loaded when their batch is formed: of batches on their way there are no more than rollout.max_lead allows.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import numpy as np

from headway.errors import HeadwayError
from headway.events import AnyEvent, BatchFormed, GroupDropped, Ready
from headway.flow.channels import Channel
from headway.flow.failed_groups import DropFailed
from headway.flow.losses import lost_after_finishing
from headway.flow.sink_policy import SinkPolicy
from headway.flow.user_functions import Advantages, called, checked_advantages
from headway.flow.watch import Watch
from headway.rules.admission import GateLimits
from headway.rules.batching import MAX_REQUEUES, can_form, chosen, doomed, groups_to_take, in_the_way, may_form, nothing_left
from headway.types import Batch, Cause, FinishedGroup, Prompt, ReadyGroup, Rollout

_log = logging.getLogger("headway")

KeepGroup = Callable[[Sequence[float]], bool]
LoadGroups = Callable[[Sequence[ReadyGroup]], Awaitable[tuple[ReadyGroup, ...]]]


class TrainSink:
    """Collects groups and forms batches, each in a task of its own; the end of the input and of the forming closes the output."""

    def __init__(
        self,
        *,
        groups: Channel[FinishedGroup],
        batches: Channel[Batch],
        watch: Watch,
        record: Callable[[AnyEvent], None],
        flush: Callable[[], Awaitable[None]],
        requeue: Callable[[Prompt], None],
        cancel: Callable[[int], Prompt | None],
        drop_failed: DropFailed,
        load: LoadGroups,
        limits: GateLimits,
        policy: SinkPolicy,
        advantages: Advantages,
        keep: KeepGroup | None,
        clock: Callable[[], float],
        ready: Iterable[ReadyGroup] = (),
    ) -> None:
        self._groups = groups
        self._batches = batches
        self._watch = watch
        self._record = record
        self._flush = flush
        self._requeue = requeue
        self._cancel = cancel
        self._drop_failed = drop_failed
        self._load = load
        self._limits = limits
        self._policy = policy
        self._advantages = advantages
        self._keep = keep
        self._clock = clock
        self._ready: dict[int, ReadyGroup] = {group.admission.group: group for group in ready}
        self._recalled: dict[int, bool] = {}  # dropped on their way here; whether the prompt is to be tried again
        self._replaced = 0  # zero-advantage groups replaced since the last batch
        self._parked_since: float | None = None
        self._parked_seconds = 0.0

    @property
    def parked_seconds(self) -> float:
        """How long, in all, a full batch has waited for the trainer to catch up."""
        running = 0.0 if self._parked_since is None else asyncio.get_running_loop().time() - self._parked_since
        return self._parked_seconds + running

    async def run(self) -> None:
        """Collect and form until the input ends and nothing more can be formed."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._collect(), name="train sink: collect")
            tasks.create_task(self._form(), name="train sink: form")

    async def _collect(self) -> None:
        async for group in self._groups:
            self._take_in(group)

    def take_ingested(self, group: FinishedGroup) -> None:
        """Take in a replayed or external group, whose rollouts are durable and whose place in a batch is recorded.

        What code of the user's makes of rewards that somebody sent is no reason to end the run: the group is dropped.
        """
        try:
            self._take_in(group)
        except HeadwayError as error:
            _log.warning("group %d from elsewhere is dropped: %s", group.admission.group, error)
            self._drop(group, "score_error", str(error))

    def _take_in(self, group: FinishedGroup) -> None:
        if group.admission.group in self._recalled:
            if self._recalled.pop(group.admission.group):
                self._requeue(group.admission.prompt)
            return
        rollouts, lost = self._usable(group)
        members = group.admission.members
        if doomed(members, len(lost), whole_groups_only=self._policy.whole_groups_only):
            self._drop_incomplete(group, lost)
            return
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        if all(map(self._policy.keeps_out, rollouts)):
            self._drop(group, "over_length", 'every member hit a length limit (rollout.overlong = "mask")')
            return
        if self._keep is not None and not called("rollout.filter", self._keep, rewards):
            self._drop(group, "filtered", "the filter of rollout.filter said no")
            return
        advantages = checked_advantages(self._advantages, np.asarray(rewards, dtype=np.float64))
        ready = ReadyGroup(group.admission, rollouts, tuple(advantages.tolist()), self._watch.now.version)
        if ready.zero_advantage and self._replaced < self._policy.most_replaced:
            self._replaced += 1
            self._drop(group, "zero_advantage", f"all members scored {rewards[0]:g}; replaced")
            return
        self._ready[group.admission.group] = ready
        self._record(self._told(ready))

    def _told(self, ready: ReadyGroup) -> Ready:
        scored = ready.rollouts if self._policy.scored_apart else ()
        scores = tuple((rollout.member, rollout.reward or 0.0) for rollout in scored)
        parts = tuple((rollout.member, dict(rollout.rewards)) for rollout in scored if rollout.rewards)
        return Ready(self._clock(), ready.admission.group, ready.zero_advantage, scores, parts)

    def _drop_incomplete(self, group: FinishedGroup, lost: Sequence[Cause]) -> None:
        detail = f"lost {len(lost)} of {group.admission.members} members: {', '.join(sorted(set(lost)))}"
        if group.admission.group in self._watch.now.ingested:  # nobody's prompt: there is nothing to try again
            self._drop(group, "incomplete", detail)
        else:
            self._drop_failed(group.admission, group.rollouts, lost, detail)

    def _contributing(self, ready: ReadyGroup, k: int) -> Iterator[float]:
        return self._policy.contributing(ready, k, self._limits)

    def _usable(self, group: FinishedGroup) -> tuple[tuple[Rollout, ...], list[Cause]]:
        lost = list(group.lost)
        usable = []
        for rollout in group.rollouts:
            if rollout.reward is None or not math.isfinite(rollout.reward):
                lost.append(self._lost(rollout, "bad_reward", f"the reward is {rollout.reward}"))
            elif rollout.finish != "stop" and self._policy.overlong == "drop":
                lost.append(self._lost(rollout, "over_length", f'it ended by {rollout.finish} (rollout.overlong = "drop")'))
            else:
                usable.append(rollout)
        return tuple(usable), lost

    def _lost(self, rollout: Rollout, cause: Cause, detail: str) -> Cause:
        """Record a finished rollout that no batch will see, and return its cause."""
        self._record(lost_after_finishing(rollout, cause, detail, now=self._clock()))
        return cause

    def _drop(self, group: FinishedGroup | ReadyGroup, cause: Cause, detail: str, *, requeued: bool = False) -> None:
        sampled = sum(rollout.sampled_tokens for rollout in group.rollouts)
        self._record(GroupDropped(self._clock(), group.admission.group, cause, detail, sampled, requeued))
        if requeued:
            self._requeue(group.admission.prompt)

    async def _form(self) -> None:
        ledger = self._watch.now
        while not self._at_the_end():
            if not can_form(ledger, self._limits):
                await self._watch.until(lambda now: can_form(now, self._limits) or self._at_the_end())
            elif not may_form(ledger, self._limits.max_lead):
                await self._wait_for_trainer()
            elif not (self._drop_stale() or self._drop_in_the_way()):
                await self._ship(chosen(ledger, groups_to_take(ledger, self._limits)))
        self._batches.close()

    def _at_the_end(self) -> bool:
        """Whether nothing more will be formed: no group can come that a batch would take."""
        ledger = self._watch.now
        return bool(ledger.draining) or ledger.next_batch >= self._limits.steps or nothing_left(ledger)

    async def _wait_for_trainer(self) -> None:
        loop = asyncio.get_running_loop()
        self._parked_since = loop.time()
        try:
            await self._watch.until(lambda now: may_form(now, self._limits.max_lead) or bool(now.draining))
        finally:
            self._parked_seconds += loop.time() - self._parked_since
            self._parked_since = None

    def _drop_stale(self) -> bool:
        """Drop the groups of which no token may contribute to the next batch; say whether there were any."""
        k = self._watch.now.next_batch
        stale = [group for group, ready in self._ready.items() if next(self._contributing(ready, k), None) is None]
        for group in stale:
            ready = self._ready.pop(group)
            newest = max(rollout.tail for rollout in ready.rollouts if not self._policy.keeps_out(rollout))
            detail = f"its newest token is of version {newest}: {k - newest} versions old in batch {k}"
            self._drop(ready, "stale", detail, requeued=self._again(ready.admission.prompt.id, ready.admission.prompt.epoch))
        return bool(stale)

    def _drop_in_the_way(self) -> bool:
        """Drop the groups for which a later batch would have no room in time (`on_stale = "drop"`); say whether there were any."""
        ledger, limits = self._watch.now, self._limits
        if limits.on_stale != "drop":
            return False
        gone = in_the_way(ledger, limits, groups_to_take(ledger, limits))
        for group in gone:
            unit = ledger.running.get(group) or ledger.ready[group]
            detail = f"born at version {unit.birth}: it would be more than {limits.max_staleness} versions old"
            requeued = self._again(unit.prompt_id, unit.epoch)
            if (ready := self._ready.pop(group, None)) is not None:
                self._drop(ready, "stale", detail, requeued=requeued)
                continue
            prompt = self._cancel(group)
            self._record(GroupDropped(self._clock(), group, "stale", detail, unit.sampled_tokens, requeued))
            if prompt is None:  # it is being scored, or on its way here: its prompt comes with it
                self._recalled[group] = requeued
            elif requeued:
                self._requeue(prompt)
        return bool(gone)

    def _again(self, prompt: str, epoch: int) -> bool:
        """Whether a prompt whose group went stale is tried again."""
        return self._watch.now.requeued.get((prompt, epoch), 0) < MAX_REQUEUES

    async def _ship(self, numbers: Sequence[int]) -> None:
        ledger, limits = self._watch.now, self._limits
        groups = tuple(self._ready.pop(group) for group in numbers)
        if not any(any(self._contributing(group, ledger.next_batch)) for group in groups):
            for group in groups:
                self._drop(group, "zero_advantage", "a whole batch of groups without an advantage to train on")
            return
        rewards = [rollout.reward for group in groups for rollout in group.rollouts if rollout.reward is not None]
        k = ledger.next_batch
        self._record(BatchFormed(self._clock(), k, tuple(numbers), float(np.mean(rewards))))
        self._replaced = 0
        await self._flush()
        whole = await self._load(groups)
        masked = self._policy.kept_out(groups)
        await self._batches.send(Batch(k, whole, limits.max_staleness, limits.on_stale, self._policy.temperature, masked))
