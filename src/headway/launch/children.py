"""Engines and trainer as children of a run: started together (importing torch takes longest), ready together, ended with the run.

One that dies is started again (`headway.launch.supervisor`): an engine where it was, with the weights that are served; the trainer takes
up the newest version and the batch that it was at by itself.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from headway.errors import TrainerFailed
from headway.flow.engine_pool import EnginePool
from headway.formats import shared_memory
from headway.formats.run_directory import RunDirectory, load_run_info, numbered
from headway.launch.closers import Closers
from headway.launch.launched_engines import STOP_SECONDS, LaunchedEngines
from headway.launch.processes import ChildProcess
from headway.launch.starting import Start, all_ready
from headway.launch.supervisor import Supervisor
from headway.settings import Config, thread_limit
from headway.types import Checkpoint, EngineAddress

_TRAINER = "trainer"
_log = logging.getLogger("headway.trainer")  # told at the terminal, too


class Children:
    """The child processes that a config asks for, kept alive by `keep_alive`. `closers` end them, whatever happens."""

    def __init__(self, config: Config, directory: RunDirectory, first: Checkpoint, closers: Closers) -> None:
        self._config = config
        self._directory = directory
        self._closers = closers
        self._engines = LaunchedEngines(config, directory, first, closers)
        self._trainer: Supervisor | None = None

    async def start(self, *, resumed: bool) -> Sequence[EngineAddress]:
        """Start trainer and engines together; return where the engines are, those that were launched.

        `resumed`: a process before may have their ports yet.
        """
        starts = await self._engines.starts(resumed=resumed)
        launches = bool(starts)
        if self._config.trainer.kind == "embedded":
            starts.insert(0, Start(_TRAINER, self._begin_trainer, self._config.trainer.start_timeout_seconds))
        await all_ready(starts)
        return self._engines.addresses() if launches else ()

    def failure(self) -> str | None:
        """Return why the trainer will bring no more versions, in one line; None: it may, or it is no child."""
        return self._trainer.failure() if self._trainer else None

    def restarts(self) -> dict[str, int]:
        """Return how often engines and trainer were started again, for the pipeline's rows."""
        return {"engine_restarts": self._engines.restarts, "trainer_restarts": self._trainer.restarts if self._trainer else 0}

    async def keep_alive(self, pool: EnginePool) -> None:
        """Start engines and trainer again when they die; raises what a child is given up for."""
        async with asyncio.TaskGroup() as keeping:
            if self._trainer:
                keeping.create_task(self._keep_trainer(self._trainer), name="keep the trainer alive")
            keeping.create_task(self._engines.keep_alive(pool), name="keep the engines alive")

    async def _begin_trainer(self) -> ChildProcess:
        child = await self._new_trainer()
        trainer = self._config.trainer
        self._trainer = Supervisor(
            child,
            max_restarts=trainer.max_restarts,
            setting="trainer.max_restarts",
            start_timeout_seconds=trainer.start_timeout_seconds,
            log=_log,
        )
        self._closers.add(_TRAINER, self._end_trainer, self._trainer)
        return child

    async def _end_trainer(self, trainer: Supervisor) -> None:
        """End it, and remove what it kept in shared memory: one that was killed could not."""
        try:
            await trainer.stop(STOP_SECONDS)
        finally:  # also where nobody waits for it any more: it is killed then
            if self._config.engine.weight_transfer == "memory":
                shared_memory.clear(shared_memory.memory_of(load_run_info(self._directory).id))

    async def _keep_trainer(self, trainer: Supervisor) -> None:
        def newest() -> int:
            return max(numbered(self._directory.weights), default=-1)

        await trainer.run(again=self._new_trainer, progress=newest, finished=lambda: newest() >= self._config.run.steps)

    async def _new_trainer(self) -> ChildProcess:
        return await ChildProcess.start(
            _TRAINER,
            [sys.executable, "-m", "headway", "trainer", "--run", str(self._directory.path)],
            log=self._directory.logs / "trainer.log",
            error=TrainerFailed,
            threads=thread_limit(self._config.trainer.threads),
            may_end=True,  # when all steps are trained; before, who waits for the next version is told (DirectoryTrainer)
        )
