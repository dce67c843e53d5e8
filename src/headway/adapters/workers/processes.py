"""Rollout workers as local processes: calls go to the least loaded, and a process that dies is replaced.

The user's code runs there and nowhere else, so what it blocks, leaks or crashes is not the orchestrator's. A process that dies takes its
calls with it: each ends as a retryable `worker_died`. It is started again, up to `max_restarts` times in a row without having answered
a call; when no process is left, calls raise `WorkerFailed`. A process that is merely silent is busy, not dead; one in which a call goes
on that was cancelled and has used up its clean-up budget is replaced, so that stuck user code never takes the place of others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from headway.adapters.workers.child import Answer, Child
from headway.errors import ConfigError, WorkerFailed
from headway.formats.wire import Attempt, Cancel, Drain, Failed, Finished, ScoreCall, Scored, ToWorker, WorkerSpec
from headway.protocols import Mover
from headway.rules.scheduling import backoff_seconds
from headway.settings import EnvironmentSection
from headway.types import AttemptRequest, Failure, Rollout, Score, ScoreRequest

_log = logging.getLogger(__name__)
_told = logging.getLogger("headway.workers")  # told at the terminal, too (headway.launch.telling)
_RESTART_SECONDS = 0.1  # doubled per restart in a row
_LONGEST_RESTART_SECONDS = 10.0
_GRACE_SECONDS = 3.0  # beyond the clean-up budget: for the worker's own limit to act first


class ProcessWorkers:
    """A worker (`protocols.Worker`) made of local processes. Use `start`."""

    def __init__(self, spec: WorkerSpec, logs: Path, children: Sequence[Child], *, max_restarts: int, start_timeout_seconds: float) -> None:
        self.restarts = 0  # in all, of all processes
        self._spec = spec
        self._logs = logs
        self._max_restarts = max_restarts
        self._start_timeout_seconds = start_timeout_seconds
        self._numbers = itertools.count()
        self._children = list(children)
        self._leaving: dict[Child, asyncio.Task[None]] = {}  # those that were replaced and have calls under way
        self._changed = asyncio.Event()
        self._failure: WorkerFailed | None = None
        self._supervisors = [asyncio.create_task(self._supervise(child), name=child.name) for child in children]
        for supervisor in self._supervisors:
            supervisor.add_done_callback(self._supervisor_ended)

    @classmethod
    async def start(
        cls,
        section: EnvironmentSection,
        *,
        base: Path,
        model: Path,
        lineage: str,
        logs: Path,
        max_restarts: int = 3,
        start_timeout_seconds: float = 120.0,
    ) -> ProcessWorkers:
        """Start `section.workers` processes, each with a log file in `logs`, and wait until all are ready.

        `base` is the config file's directory, `model` one with the model's tokenizer. Raises `ConfigError` when the user's code does not
        import, `WorkerFailed` when a process does not come up.
        """
        spec = WorkerSpec.of(section, base=base, model=model, lineage=lineage)
        names = [f"worker-{index}" for index in range(section.workers)]
        starts = [asyncio.create_task(Child.spawn(name, spec, logs / f"{name}.log", start_timeout_seconds)) for name in names]
        try:
            children = await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            for started in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(started, Child):
                    await started.kill()
            raise
        return cls(spec, logs, children, max_restarts=max_restarts, start_timeout_seconds=start_timeout_seconds)

    async def attempt(self, request: AttemptRequest, move: Mover | None = None) -> Rollout | Failure:
        """Attempt a prompt once. Never raises for what user code or an engine did: that is a Failure."""
        match await self._call(lambda number: Attempt(number, request, move is not None), move):
            case Finished(_, rollout):
                return rollout
            case Failed(_, failure):
                return failure
            case other:
                raise WorkerFailed(f"a worker answered an attempt by {type(other).__name__}")

    async def score(self, request: ScoreRequest) -> Sequence[Score] | Failure:
        """Score the rollouts given, in order."""
        match await self._call(lambda number: ScoreCall(number, request)):
            case Scored(_, scores):
                return scores
            case Failed(_, failure):
                return failure
            case other:
                raise WorkerFailed(f"a worker answered a scoring by {type(other).__name__}")

    async def close(self) -> None:
        """Cancel what runs, let user code clean up within its budget, and end the processes, all at once; idempotent."""
        self._fail(WorkerFailed("the workers are closed"))
        tasks = [*self._supervisors, *self._leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        children, self._children, self._leaving = [*self._children, *self._leaving], [], {}
        await asyncio.gather(*map(self._end, children))
        for child in children:
            child.fail_calls(Failure("cancelled", "the workers were closed", retryable=False))

    async def _end(self, child: Child) -> None:
        if child.overdue and not child.calls:  # user code gets its budget once
            _log.warning("%s is killed: %d cancelled calls had not cleaned up within their budget", child.name, len(child.overdue))
            await child.kill()
        else:
            await child.end(Drain(), self._spec.cleanup_seconds + _GRACE_SECONDS)

    async def _call(self, message: Callable[[int], ToWorker], mover: Mover | None = None) -> Answer:
        while not self._children or self._failure is not None:
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()
        child = min(self._children, key=lambda each: len(each.calls))
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        child.calls[number] = answer
        child.send(message(number))
        try:
            if mover is not None:
                child.moves.allow(number, mover)
            return await answer
        except asyncio.CancelledError:
            child.moves.refuse(number)
            # the call is over when the user's code has cleaned up, within its budget: until then it counts as running
            if number in child.calls and child.connected:
                child.calls[number] = ended = loop.create_future()
                cancelled = loop.time()
                child.send(Cancel(number))
                await asyncio.wait((ended,), timeout=self._spec.cleanup_seconds + _GRACE_SECONDS)
                if not ended.done():
                    child.overrun(number, cancelled=cancelled)
            raise
        finally:
            child.over(number)

    async def _supervise(self, child: Child) -> None:
        """Replace a process each time it dies, or user code in it is stuck, until that happens too often."""
        restarts, how = 0, f"{child.name} runs user code that does not end"
        while True:
            await child.used_up()
            self._children.remove(child)
            if child.leaving.is_set():
                self._leaving[child] = asyncio.create_task(self._see_off(child), name=f"{child.name} leaves")
            else:
                how = await self._mourn(child)
            restarts = 1 if child.answered else restarts + 1
            successor = None
            while successor is None:
                if restarts > self._max_restarts:
                    self._give_up(how)
                    return
                wait = backoff_seconds(restarts, random.random(), first=_RESTART_SECONDS, longest=_LONGEST_RESTART_SECONDS)  # noqa: S311
                await asyncio.sleep(wait)
                self.restarts += 1
                try:
                    successor = await Child.spawn(child.name, self._spec, self._logs / f"{child.name}.log", self._start_timeout_seconds)
                except (ConfigError, WorkerFailed, OSError) as error:
                    how = str(error)
                    restarts += 1
            child = successor
            _told.info("%s is up again", child.name)
            self._children.append(child)
            self._announce()

    async def _see_off(self, child: Child) -> None:
        await self._mourn(child)
        del self._leaving[child]

    async def _mourn(self, child: Child) -> str:
        """Wait for the end of a process, and end its calls; return how it ended, for people."""
        how = await child.wait()
        await child.kill()
        if child.calls or not child.leaving.is_set():
            _told.warning("%s; %d rollouts are lost with it", how, len(child.calls))
        child.fail_calls(Failure("worker_died", how, retryable=True))
        return how

    def _supervisor_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failure = WorkerFailed(f"supervising {task.get_name()} failed: {error!r}")
            failure.__cause__ = error
            self._fail(failure)

    def _give_up(self, how: str) -> None:
        _told.error("%s; it was started again %d times in a row without answering a call, and is given up", how, self._max_restarts)
        if not self._children and all(task.done() or task is asyncio.current_task() for task in self._supervisors):
            self._fail(WorkerFailed(f"no rollout worker is left: {how}"))

    def _fail(self, failure: WorkerFailed) -> None:
        self._failure = failure
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed.clear()
