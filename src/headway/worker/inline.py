"""Runs environments inside the calling process, on its own loop (`environment.workers = 0`): for tests and for debugging.

The same `Runtime` as in a worker process, so the same masks, causes and clean-up; but user code that blocks, blocks the caller too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headway.errors import WorkerFailed
from headway.formats.wire import WorkerSpec
from headway.protocols import Mover
from headway.settings import EnvironmentSection
from headway.types import AttemptRequest, Failure, Rollout, Score, ScoreRequest
from headway.worker.runtime import Runtime, end_within

T = TypeVar("T")
_log = logging.getLogger(__name__)


class InlineWorker:
    """A worker (`protocols.Worker`) without a process. Cancelled user code gets `cleanup_seconds` to clean up."""

    def __init__(self, runtime: Runtime, *, cleanup_seconds: float) -> None:
        self._runtime = runtime
        self._cleanup_seconds = cleanup_seconds
        self._tasks: set[asyncio.Task[Any]] = set()
        self._left_behind: set[asyncio.Task[Any]] = set()  # kept: a loop holds its tasks weakly
        self._closed = False

    @classmethod
    def open(cls, section: EnvironmentSection, *, base: Path, model: Path, lineage: str) -> InlineWorker:
        """Import the user's code and be ready. Raises `ConfigError`."""
        spec = WorkerSpec.of(section, base=base, model=model, lineage=lineage)
        return cls(Runtime.load(spec), cleanup_seconds=spec.cleanup_seconds)

    async def attempt(self, request: AttemptRequest, move: Mover | None = None) -> Rollout | Failure:
        """Attempt a prompt once. Never raises for what user code or an engine did: that is a Failure."""
        return await self._run(self._runtime.attempt(request, move))

    async def score(self, request: ScoreRequest) -> Sequence[Score] | Failure:
        """Score the rollouts given, in order."""
        return await self._run(self._runtime.score(request))

    async def close(self) -> None:
        """Cancel what runs, let user code clean up within its budget, and release everything; idempotent."""
        self._closed = True
        await asyncio.gather(*(self._end(task) for task in self._tasks))
        await self._runtime.close()

    async def _run(self, work: Coroutine[Any, Any, T | Failure]) -> T | Failure:
        if self._closed:
            work.close()
            raise WorkerFailed("the worker is closed")
        # a task of its own: the caller's cancellation must not be the clean-up's only clock
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            await self._end(task)
            raise
        return Failure("cancelled", "the worker was closed", retryable=False) if task.cancelled() else task.result()

    async def _end(self, task: asyncio.Task[Any]) -> None:
        if not await end_within(task, self._cleanup_seconds):
            _log.warning("an environment had not cleaned up %g s after it was cancelled: left behind", self._cleanup_seconds)
            self._tasks.discard(task)  # user code gets its budget once: `close` does not wait for it again
            self._left_behind.add(task)
