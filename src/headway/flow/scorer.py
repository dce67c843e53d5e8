"""The scorer: an optional stage between a finished group and the sink, with its own concurrency, deadline and causes of failure.

With scope "rollout" each member is scored by itself and an unscored one is lost; with scope "group" all are scored together, and the group
stands or falls whole. A score is never invented: a scorer that says None, or fails and goes on failing, loses the member. What is lost to
no fault of its own, as with a worker that died, is scored again: the rollout is there. Payloads that were left on disk are loaded for as
long as they are being scored.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec

from headway.errors import StorageError
from headway.events import AnyEvent
from headway.flow.channels import Channel
from headway.flow.losses import lost_after_finishing
from headway.rules.scheduling import retry_delay_seconds
from headway.types import Cause, Failure, FinishedGroup, Rollout, Score, ScoreRequest

TRIES = 3  # of one call, while its failures can be retried

Load = Callable[[Sequence[Rollout]], Awaitable[tuple[Rollout, ...]]]


class Scorer:
    """Scores finished groups through `score`, several at once. One that is not live any more by its turn is passed on as it is."""

    def __init__(
        self,
        *,
        finished: Channel[FinishedGroup],
        score: Callable[[ScoreRequest], Awaitable[Sequence[Score] | Failure]],
        scope: Literal["rollout", "group"],
        concurrency: int,
        timeout_seconds: float,
        load: Load,
        record: Callable[[AnyEvent], None],
        clock: Callable[[], float],
        is_live: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._finished = finished
        self._is_live = is_live
        self.scored: Channel[FinishedGroup] = Channel(concurrency)
        self._score = score
        self._scope = scope
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout_seconds = timeout_seconds
        self._load = load
        self._record = record
        self._clock = clock
        self._calls: set[asyncio.Timeout] = set()  # of groups; an evaluation's are not the drain's to end
        self._stopped = False
        self._leaves = False

    def cancel_all(self) -> None:
        """Score no further group, and end those that are being scored: their rollouts are lost as cancelled, and stay in the journal."""
        if not self._stopped:
            self._stopped = True
            for call in self._calls:
                call.reschedule(asyncio.get_running_loop().time())

    def leave_all(self) -> None:
        """Score no further group, and leave those that are being scored as they are: a later process of this run scores them."""
        self._leaves = True
        self.cancel_all()

    async def run(self) -> None:
        """Score what comes, until the end of the input."""
        async with asyncio.TaskGroup() as tasks:
            async for group in self._finished:
                await self._slots.acquire()  # back-pressure: a slow scorer fills the channel, not the memory
                self._slots.release()
                tasks.create_task(self._group(group))
        self.scored.close()

    async def _group(self, group: FinishedGroup) -> None:
        if not self._is_live(group.admission.group):  # dropped while it waited: its payloads may be gone
            await self.scored.send(group)
            return
        if self._scope == "group":
            parts = [group.rollouts] if group.rollouts else []
        else:
            parts = [(rollout,) for rollout in group.rollouts]
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(self._part(group, part)) for part in parts]
        if any(call.result() is None for call in calls):
            return
        if not self._is_live(group.admission.group):  # dropped meanwhile: nothing was lost here
            await self.scored.send(group)
            return
        rollouts: list[Rollout] = []
        lost: list[Cause] = list(group.lost)
        for part, call in zip(parts, calls, strict=True):
            result = call.result() or ()
            if isinstance(result, Failure):
                lost.extend(self._lost(rollout, result.cause, result.detail) for rollout in part)
                continue
            for rollout, score in zip(part, result, strict=True):
                if score.reward is None or not math.isfinite(score.reward):
                    lost.append(self._lost(rollout, "bad_reward", f"the scorer said {score.reward}"))
                else:
                    merged = {**rollout.rewards, **score.rewards}
                    rollouts.append(msgspec.structs.replace(rollout, reward=float(score.reward), rewards=merged))
        await self.scored.send(FinishedGroup(group.admission, tuple(rollouts), tuple(lost)))

    def _lost(self, rollout: Rollout, cause: Cause, detail: str) -> Cause:
        """Record a finished rollout that no batch will see, and return its cause."""
        self._record(lost_after_finishing(rollout, cause, detail, now=self._clock()))
        return cause

    async def _part(self, group: FinishedGroup, rollouts: tuple[Rollout, ...]) -> Sequence[Score] | Failure | None:
        """Score them; None: they are left to a later process."""
        call = asyncio.timeout(0.0 if self._stopped else None)
        try:
            async with call:
                self._calls.add(call)
                try:
                    number = group.admission.group
                    request = ScoreRequest(number, group.admission.prompt, rollouts)
                    return await self.score(request, wanted=lambda: self._is_live(number))
                finally:
                    self._calls.discard(call)
        except TimeoutError:
            if not call.expired():
                raise  # somebody else's: not the end of the run
            return None if self._leaves else Failure("cancelled", "the run ends", retryable=False)

    async def score(self, request: ScoreRequest, *, wanted: Callable[[], bool] = lambda: True) -> Sequence[Score] | Failure:
        """Score one request within the concurrency and the deadline that all share; one score per rollout, or a failure.

        `wanted`: whether anybody will see the score; otherwise the payloads may be gone, and the scorer is not asked.
        """
        async with self._slots:
            rollouts = await self._loaded(request.rollouts, wanted) if wanted() else None
            if rollouts is None:
                return Failure("cancelled", "its group was dropped", retryable=False)
            whole = msgspec.structs.replace(request, rollouts=rollouts)
            result = await self._within_limit(whole)
            for tries in range(1, TRIES):
                if not isinstance(result, Failure) or not result.retryable:
                    break
                await asyncio.sleep(retry_delay_seconds(tries, request.group))
                result = await self._within_limit(whole)
        if not isinstance(result, Failure) and len(result) != len(request.rollouts):
            detail = f"the scorer gave {len(result)} scores for {len(request.rollouts)} rollouts"
            return Failure("score_error", detail, retryable=False)
        return result

    async def _loaded(self, rollouts: Sequence[Rollout], wanted: Callable[[], bool]) -> tuple[Rollout, ...] | None:
        """Return the rollouts with their payloads; None: these went with the group, that was dropped meanwhile. Raises StorageError."""
        try:
            return await self._load(rollouts)
        except (StorageError, ExceptionGroup):
            if wanted():
                raise
            return None

    async def _within_limit(self, request: ScoreRequest) -> Sequence[Score] | Failure:
        limit = asyncio.timeout(self._timeout_seconds or None)
        try:
            async with limit:
                return await self._score(request)
        except TimeoutError:
            if not limit.expired():
                raise
            return Failure("score_error", f"the scorer took longer than {self._timeout_seconds:g} s", retryable=False)
