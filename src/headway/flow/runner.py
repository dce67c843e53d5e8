"""The rollout runner brings one rollout to its one ending: attempts, retries, an engine for each, and the deadline.

An attempt that loses its engine goes on at another, or once one serves again, from the turns that it has; with `on_lost` "restart", or
where that cannot be, it is made again. Neither is anybody's failure: it counts neither for `max_attempts` nor as a failure in a row, up to
`MOVES` times a rollout, both kinds together (one that breaks every engine it meets is not moved for ever).

A rollout ends as a `Rollout` or as a `Failure`, exactly once. Its deadline spans all attempts; one sweep watches over all deadlines (they
are due in the order in which rollouts started), so no rollout costs a timer. Failed attempts in a row are counted over all training
rollouts; too many end the run with the last cause. Evaluation has no say in that: its failures are a figure in its row.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from headway.errors import EngineFailed, EnvironmentFailed, HeadwayError, WorkerFailed
from headway.flow.berth import Berth
from headway.flow.engine_pool import EnginePool, Place
from headway.protocols import Mover
from headway.rules.scheduling import retry_delay_seconds, rollout_seed
from headway.types import AttemptRequest, Failure, Prompt, Purpose, Rollout, SamplingParams

MOVES = 10
_log = logging.getLogger(__name__)
_MOST_TOLD = 20  # failures of different kinds that the log shows; all are in the journal
_FAILED_BY: dict[str, type[HeadwayError]] = {"engine_error": EngineFailed, "worker_died": WorkerFailed}


@dataclass(slots=True, eq=False)
class _Deadline:
    due: float
    task: asyncio.Task[object]
    expired: bool = False


class RolloutRunner:
    """Runs rollouts through `attempt`, each at an engine of the pool, which serves it to its end, if it lives as long.

    `attempt` is given a mover, if a rollout is to go on elsewhere. `lost_since`: whether the engine of an attempt that failed there was
    lost. `lora`: the policy is a LoRA adapter at the engines.
    """

    def __init__(
        self,
        *,
        attempt: Callable[[AttemptRequest, Mover | None], Awaitable[Rollout | Failure]],
        pool: EnginePool,
        lost_since: Callable[[Place], Awaitable[bool]],
        sampling: SamplingParams,
        run_seed: int,
        max_rollout_tokens: int = 0,
        timeout_seconds: float = 0.0,
        max_attempts: int = 3,
        max_consecutive_failures: int = 0,
        on_lost: Literal["continue", "restart"] = "continue",
        lora: bool = False,
    ) -> None:
        self._attempt = attempt
        self._pool = pool
        self._lost_since = lost_since
        self._sampling = sampling
        self._run_seed = run_seed
        self._max_rollout_tokens = max_rollout_tokens
        self._timeout_seconds = timeout_seconds
        self._max_attempts = max_attempts
        self._max_consecutive_failures = max_consecutive_failures
        self._goes_on = on_lost == "continue"
        self._lora = lora
        self._failures_in_a_row = 0
        self._last_death = ""
        self._told: set[str] = set()
        self._deadlines: dict[_Deadline, None] = {}  # in the order in which they are due: the limit is the same for all
        self._started = asyncio.Event()

    def run(
        self,
        prompt: Prompt,
        *,
        group: int,
        member: int,
        purpose: Purpose = "train",
        sampling: SamplingParams | None = None,
        on_retry: Callable[[int, Failure], None] | None = None,
    ) -> Awaitable[Rollout | Failure]:
        """Bring one rollout to its end. `on_retry(attempt, failure)` hears of attempts that failed and are tried again."""
        attempts = partial(self._attempts, prompt, group, member, purpose, sampling or self._sampling, on_retry)
        return self._in_time(purpose, attempts) if self._timeout_seconds else attempts()

    async def _in_time(self, purpose: Purpose, attempts: Callable[[], Awaitable[Rollout | Failure]]) -> Rollout | Failure:
        """Make the attempts of one rollout, which has a deadline from here on."""
        if not self._pool.is_open:
            await self._pool.until_open()  # what a weight sync waits for has its own limits, and is not this rollout's doing
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  a coroutine runs in a task
        deadline = _Deadline(asyncio.get_running_loop().time() + self._timeout_seconds, task)
        if not self._deadlines:
            self._started.set()
        self._deadlines[deadline] = None
        try:
            return await attempts()
        except asyncio.CancelledError:
            if not deadline.expired or task.uncancel() > 0:
                raise
            return self._ended(purpose, Failure("timeout", f"not finished within {self._timeout_seconds:g} s", retryable=False))
        finally:
            self._deadlines.pop(deadline, None)

    async def sweep(self) -> None:
        """Cancel the rollouts whose deadline has passed, for ever. The one timer of all rollouts."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._deadlines:
                self._started.clear()
                await self._started.wait()
            first = next(iter(self._deadlines))
            if (wait := first.due - loop.time()) > 0:
                await asyncio.sleep(wait)
            elif not first.expired:
                first.expired = True
                first.task.cancel()
                await asyncio.sleep(0)
            else:  # its clean-up takes a while: let the others not wait for it
                del self._deadlines[first]

    async def _attempts(
        self,
        prompt: Prompt,
        group: int,
        member: int,
        purpose: Purpose,
        sampling: SamplingParams,
        on_retry: Callable[[int, Failure], None] | None,
    ) -> Rollout | Failure:
        number = moves = restarts = 0
        while True:
            seed = rollout_seed(self._run_seed, purpose, prompt, member, number)
            place = await self._pool.acquire()
            berth = Berth(self._pool, place, lost_since=self._lost_since, most_moves=MOVES - moves)
            request = AttemptRequest(
                group, member, number, prompt, purpose, place.url, seed, sampling, self._max_rollout_tokens, place.kind, self._lora
            )
            result, lost = await self._at(berth, request, place.task)
            number += 1
            moves += berth.moves
            if lost and moves < MOVES:
                moves += 1
                restarts += 1
            else:
                self._ended(purpose, result)
                if isinstance(result, Rollout) or not result.retryable or number - restarts >= self._max_attempts:
                    return result
            if on_retry is not None and isinstance(result, Failure):
                on_retry(number - 1, result)
            await asyncio.sleep(retry_delay_seconds(number, seed))

    async def _at(self, berth: Berth, request: AttemptRequest, task: asyncio.Task[object]) -> tuple[Rollout | Failure, bool]:
        """Make one attempt, in this task, and give its place back; return what came of it, and whether its engine was lost under it."""
        result: Rollout | Failure
        try:
            result = await self._attempt(request, berth if self._goes_on else None)
            if task.cancelling():
                raise asyncio.CancelledError  # user code has swallowed it: what it brought came too late, and nothing is tried again
        except asyncio.CancelledError:
            if not berth.cancelled or task.uncancel() > 0:
                raise
            return Failure("engine_error", f"{berth.place.name} hangs and is given up", retryable=True), True
        finally:
            berth.leave()
        if isinstance(result, Rollout):
            self._pool.worked(berth.place)
            return result, False
        return result, result.cause == "engine_error" and await berth.lost()

    def _ended(self, purpose: Purpose, result: Rollout | Failure) -> Rollout | Failure:
        if purpose == "eval":
            return result
        if isinstance(result, Rollout):
            self._failures_in_a_row = 0
            return result
        if result.cause == "worker_died":
            if result.detail == self._last_death:  # one death is one failure, however many rollouts it took along
                return result
            self._last_death = result.detail
        self._failures_in_a_row += 1
        line, _, below = result.detail.partition("\n")
        said = f"{result.cause}: {line}"
        if said not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(said)
            _log.info("an attempt failed by %s (others that fail alike are only counted)", said)
        if 0 < self._max_consecutive_failures <= self._failures_in_a_row:
            error = _FAILED_BY.get(result.cause, EnvironmentFailed)
            raise error(
                f"{self._failures_in_a_row} attempts in a row failed (run.max_consecutive_failures); the last: {said}", detail=below
            )
        return result
