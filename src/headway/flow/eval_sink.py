"""The eval sink evaluates every so many versions: no advantages, no filters, no part in the gate's live sets or the staleness statistics.

Its rollouts share max_concurrent with training, slot by slot in turn. A failed rollout is counted, never scored 0; when all fail there is
no score. An evaluation with tokens of another version than its own is flagged mixed, with the versions that wrote them. One that is cut
short has not happened: it leaves no `EvalFinished`, and no row; after a crash the next one takes its place, and its row says so.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from headway.events import AnyEvent, EvalFinished, EvalStarted
from headway.flow.watch import Watch
from headway.rules.scheduling import eval_due
from headway.settings import EvalSection
from headway.types import Failure, Prompt, Purpose, Rollout, SamplingParams, Score, ScoreRequest

ScoreOne = Callable[[ScoreRequest], Awaitable[Sequence[Score] | Failure]]


class RunEvalRollout(Protocol):
    """Brings one evaluation rollout to its end."""

    def __call__(
        self,
        prompt: Prompt,
        *,
        group: int,
        member: int,
        purpose: Purpose,
        sampling: SamplingParams,
        on_retry: Callable[[int, Failure], None],
    ) -> Awaitable[Rollout | Failure]:
        """Return the rollout, or why there is none; `on_retry` hears of attempts that failed and are tried again."""
        ...


@dataclass(slots=True)
class _Results:
    """What an evaluation has come to; `sampled_tokens` are those of all its attempts."""

    rollouts: list[Rollout] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    sampled_tokens: int = 0

    def failed_attempt(self, _: int, failure: Failure) -> None:
        """Count what an attempt has cost that is tried again."""
        self.sampled_tokens += failure.sampled_tokens


class EvalSink:
    """Runs one evaluation at a time."""

    def __init__(
        self,
        *,
        settings: EvalSection,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        watch: Watch,
        record: Callable[[AnyEvent], None],
        admit: Callable[[], Awaitable[None]],
        release: Callable[[], None],
        run_rollout: RunEvalRollout,
        score: ScoreOne | None,
        export: Callable[[str, Mapping[str, Any]], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._prompts = prompts
        self._sampling = sampling
        self._watch = watch
        self._record = record
        self._admit = admit
        self._release = release
        self._run_rollout = run_rollout
        self._score = score
        self._export = export
        self._clock = clock

    async def run(self) -> None:
        """Evaluate whenever a version is due, until cancelled."""
        while True:
            await self._watch.until(lambda now: eval_due(now, self._settings))
            await self.evaluate()

    async def evaluate(self) -> None:
        """Evaluate the version served now, and write its row."""
        version = self._watch.now.version
        total = len(self._prompts) * self._settings.n
        repeated = self._watch.now.repeated_eval is not None
        self._record(EvalStarted(self._clock(), version, total))
        started = self._clock()
        results = _Results()
        async with asyncio.TaskGroup() as tasks:
            for index, prompt in enumerate(self._prompts):
                for member in range(self._settings.n):
                    await self._admit()
                    task = tasks.create_task(self._one(prompt, index, member, results))
                    task.add_done_callback(lambda _: self._release())  # a task that is cancelled before its first step runs no `finally`
        # An engine may serve the next version before all do: the stamps say so, the ledger not yet.
        rollouts, failures = results.rollouts, results.failures
        mixed = self._watch.now.version != version or any({rollout.head, rollout.tail} != {version} for rollout in rollouts)
        self._record(EvalFinished(self._clock(), version, len(rollouts), len(failures), mixed, results.sampled_tokens))
        self._export("eval", self._row(version, started, rollouts, failures, mixed=mixed) | {"repeated": repeated})

    async def _one(self, prompt: Prompt, index: int, member: int, results: _Results) -> None:
        result = await self._run_rollout(
            prompt, group=index, member=member, purpose="eval", sampling=self._sampling, on_retry=results.failed_attempt
        )
        results.sampled_tokens += result.sampled_tokens
        if isinstance(result, Rollout) and self._score is not None:
            result = await self._scored(self._score, ScoreRequest(index, prompt, (result,)))
        if isinstance(result, Failure):
            results.failures.append(result)
        elif result.reward is None or not math.isfinite(result.reward):
            results.failures.append(Failure("bad_reward", f"the reward is {result.reward}", retryable=False))
        else:
            # only figures are needed: an evaluation's tokens fill memories
            results.rollouts.append(msgspec.structs.replace(result, payload=b""))

    @staticmethod
    async def _scored(score: ScoreOne, request: ScoreRequest) -> Rollout | Failure:
        scores = await score(request)
        return scores if isinstance(scores, Failure) else msgspec.structs.replace(request.rollouts[0], reward=scores[0].reward)

    def _row(
        self, version: int, started: float, rollouts: Sequence[Rollout], failures: Sequence[Failure], *, mixed: bool
    ) -> dict[str, Any]:
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        return {
            "version": version,
            "time": self._clock(),
            "seconds": self._clock() - started,
            "rollouts": len(rollouts) + len(failures),
            "ok": len(rollouts),
            "failed": len(failures),
            "failed_by_cause": dict(Counter(failure.cause for failure in failures)),
            "reward_mean": sum(rewards) / len(rewards) if rewards else None,
            "reward_mean_all": sum(rewards) / (len(rollouts) + len(failures)) if rewards else None,
            "rollout_tokens_mean": sum(rollout.tokens for rollout in rollouts) / len(rollouts) if rollouts else None,
            "version_min": min((rollout.head for rollout in rollouts), default=None),
            "version_max": max((rollout.tail for rollout in rollouts), default=None),
            "mixed": mixed,
            "temperature": self._sampling.temperature,
        }
