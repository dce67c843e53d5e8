"""Engine and trainer as children of a run: started together (importing torch takes longest), ready together, ended with the run.

One that dies is started again (`headway.launch.supervisor`): an engine where it was, with the weights that are served; the trainer takes
up the newest version and the batch that it was at by itself.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from headway.errors import EngineFailed, TrainerFailed
from headway.flow.engine_pool import EnginePool
from headway.formats.run_directory import RunDirectory, numbered
from headway.launch.closers import Closers
from headway.launch.processes import ChildProcess
from headway.launch.supervisor import Supervisor
from headway.secrecy import without_login
from headway.settings import Config, thread_limit
from headway.types import Checkpoint

_log = logging.getLogger("headway")
_TRAINER, _ENGINE = "trainer", "engine-0"
_HEADWAY = [sys.executable, "-m", "headway"]
_STOP_SECONDS = 10.0  # what a child gets to end by itself; everything important is on disk by then


class Children:
    """The child processes that a config asks for, kept alive by `keep_alive`. `closers` end them, whatever happens."""

    def __init__(self, config: Config, directory: RunDirectory, first: Checkpoint, closers: Closers) -> None:
        self._config = config
        self._directory = directory
        self._first = first
        self._closers = closers
        self._trainer: Supervisor | None = None
        self._engine: Supervisor | None = None
        self._port = config.engine.port

    @property
    def has_trainer(self) -> bool:
        """Whether the trainer is a child."""
        return self._trainer is not None

    async def start(self) -> list[str]:
        """Start trainer and engine together; return the engines' addresses."""
        config = self._config
        starting: list[tuple[ChildProcess, float]] = []
        if config.trainer.kind == "embedded":
            limit = config.trainer.start_timeout_seconds
            self._trainer = Supervisor(
                await self._new_trainer(),
                max_restarts=config.trainer.max_restarts,
                setting="trainer.max_restarts",
                start_timeout_seconds=limit,
            )
            self._closers.add(_TRAINER, self._trainer.stop, _STOP_SECONDS)
            starting.append((self._trainer.child, limit))
        if config.engine.launch == "embedded":
            limit = config.engine.start_timeout_seconds
            self._engine = Supervisor(
                await self._new_engine(self._first),
                max_restarts=config.engine.max_restarts,
                setting="engine.max_restarts",
                start_timeout_seconds=limit,
            )
            self._closers.add(_ENGINE, self._engine.stop, _STOP_SECONDS)
            starting.append((self._engine.child, limit))
        facts = await self._all_ready(starting)
        if self._engine is None:
            return [without_login(url) for url in config.engine.urls]
        url = str(facts[_ENGINE]["url"])
        self._port = urlsplit(url).port or 0  # a successor is reached where this one was
        return [url]

    def failure(self) -> str | None:
        """Return why the trainer will bring no more versions, in one line; None: it may, or it is no child."""
        return self._trainer.failure() if self._trainer else None

    def restarts(self) -> dict[str, int]:
        """Return how often engine and trainer were started again, for the pipeline's rows."""
        counts = {"engine_restarts": self._engine, "trainer_restarts": self._trainer}
        return {name: supervisor.restarts if supervisor else 0 for name, supervisor in counts.items()}

    async def keep_alive(self, pool: EnginePool) -> None:
        """Start engine and trainer again when they die; raises what a child is given up for."""
        async with asyncio.TaskGroup() as keeping:
            if self._trainer:
                keeping.create_task(self._keep_trainer(self._trainer), name="keep the trainer alive")
            if self._engine:
                keeping.create_task(self._keep_engine(self._engine, pool), name="keep the engine alive")

    async def _keep_trainer(self, trainer: Supervisor) -> None:
        def newest() -> int:
            return max(numbered(self._directory.weights), default=-1)

        await trainer.run(again=self._new_trainer, progress=newest, finished=lambda: newest() >= self._config.run.steps)

    async def _keep_engine(self, engine: Supervisor, pool: EnginePool) -> None:
        """Keep it alive, with the weights that are served. Dead, it is lost to the pool until the probe finds it with the right ones."""
        await engine.run(
            again=lambda: self._new_engine(pool.weights or self._first),
            progress=lambda: pool.deeds(_ENGINE),
            died=lambda error: pool.lost(_ENGINE, error),
            meanwhile=lambda: pool.returning(_ENGINE),
        )

    async def _new_trainer(self) -> ChildProcess:
        return await ChildProcess.start(
            _TRAINER,
            [*_HEADWAY, "trainer", "--run", str(self._directory.path)],
            log=self._directory.logs / "trainer.log",
            error=TrainerFailed,
            threads=thread_limit(self._config.trainer.threads),
            may_end=True,  # when all steps are trained; before, who waits for the next version is told (DirectoryTrainer)
        )

    async def _new_engine(self, weights: Checkpoint) -> ChildProcess:
        return await ChildProcess.start(
            _ENGINE,
            [*_HEADWAY, "engine", *_engine_arguments(self._config, weights, self._port)],
            log=self._directory.logs / "engine-0.log",
            error=EngineFailed,
            threads=thread_limit(self._config.engine.threads),
        )

    async def _all_ready(self, children: Sequence[tuple[ChildProcess, float]]) -> dict[str, dict[str, Any]]:
        """Wait until all are ready; the first that ends before is raised at once, whatever the others still do."""
        facts: dict[str, dict[str, Any]] = {}

        async def one(child: ChildProcess, timeout_seconds: float) -> None:
            facts[child.name] = await child.ready(timeout_seconds)
            _log.info("%s is ready: %s", child.name, facts[child.name])

        async with asyncio.TaskGroup() as starting:
            watching = [starting.create_task(child.watch(), name=f"watch {child.name}") for child, _ in children]
            ready = [starting.create_task(one(child, limit), name=f"start {child.name}") for child, limit in children]
            if ready:
                await asyncio.wait(ready)
            for task in watching:
                task.cancel()
        return facts


def _engine_arguments(config: Config, weights: Checkpoint, port: int) -> list[str]:
    engine = config.engine
    options = {
        "model": weights.directory,
        "port": port,
        "device": engine.device,
        "dtype": engine.dtype,
        "max-sequences": engine.max_sequences,
        "max-context-tokens": engine.max_context_tokens,
        "threads": engine.threads,
        "label": weights.label,
        "await-model-seconds": engine.start_timeout_seconds,
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]
