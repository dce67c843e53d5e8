"""The scorer: an optional stage between a finished group and the sink, with its own concurrency, deadline and causes of failure.

With scope "rollout" each member is scored by itself and an unscored one is lost; with scope "group" all are scored together, and the group
stands or falls whole. A score is never invented: a scorer that fails or says None loses the member.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec

from headway.flow.channels import Channel
from headway.types import Cause, Failure, FinishedGroup, Rollout, Score, ScoreRequest


class Scorer:
    """Scores finished groups through `score`, several at once."""

    def __init__(
        self,
        *,
        finished: Channel[FinishedGroup],
        score: Callable[[ScoreRequest], Awaitable[Sequence[Score] | Failure]],
        scope: Literal["rollout", "group"],
        concurrency: int,
        timeout_seconds: float,
    ) -> None:
        self._finished = finished
        self.scored: Channel[FinishedGroup] = Channel(concurrency)
        self._score = score
        self._scope = scope
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout_seconds = timeout_seconds

    async def run(self) -> None:
        """Score what comes, until the end of the input."""
        async with asyncio.TaskGroup() as tasks:
            async for group in self._finished:
                await self._slots.acquire()  # back-pressure: a slow scorer fills the channel, not the memory
                self._slots.release()
                tasks.create_task(self._group(group))
        self.scored.close()

    async def _group(self, group: FinishedGroup) -> None:
        if self._scope == "group":
            parts = [group.rollouts] if group.rollouts else []
        else:
            parts = [(rollout,) for rollout in group.rollouts]
        results = await asyncio.gather(*(self._part(group, part) for part in parts))
        rollouts: list[Rollout] = []
        lost: list[Cause] = list(group.lost)
        for part, result in zip(parts, results, strict=True):
            if isinstance(result, Failure):
                lost.extend(result.cause for _ in part)
                continue
            for rollout, score in zip(part, result, strict=True):
                if score.reward is None or not math.isfinite(score.reward):
                    lost.append("bad_reward")
                else:
                    merged = {**rollout.rewards, **score.rewards}
                    rollouts.append(msgspec.structs.replace(rollout, reward=float(score.reward), rewards=merged))
        await self.scored.send(FinishedGroup(group.admission, tuple(rollouts), tuple(lost)))

    async def _part(self, group: FinishedGroup, rollouts: tuple[Rollout, ...]) -> Sequence[Score] | Failure:
        request = ScoreRequest(group.admission.group, group.admission.prompt, rollouts)
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_seconds or None):
                    result = await self._score(request)
            except TimeoutError:
                return Failure("score_error", f"the scorer took longer than {self._timeout_seconds:g} s", retryable=False)
        if not isinstance(result, Failure) and len(result) != len(rollouts):
            return Failure("score_error", f"the scorer gave {len(result)} scores for {len(rollouts)} rollouts", retryable=False)
        return result
