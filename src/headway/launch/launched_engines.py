"""The engines that a run launches: each on a port of its own, and kept alive there, with the weights that are served."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from headway.errors import EngineFailed, TrainerFailed
from headway.flow.engine_pool import EnginePool
from headway.formats.manifest import NAME as MANIFEST
from headway.formats.run_directory import RunDirectory
from headway.launch.closers import Closers
from headway.launch.ports import LOOPBACK, Ports
from headway.launch.processes import ChildProcess
from headway.launch.servers import is_foreign, kind_of, launch_of
from headway.launch.starting import Start
from headway.launch.supervisor import Supervisor
from headway.settings import Config
from headway.types import Checkpoint, EngineAddress

STOP_SECONDS = 10.0  # what a child gets to end by itself
PREDECESSOR_SECONDS = 15.0  # more than an engine outlives its orchestrator by
_LOOK_SECONDS = 0.05
_log = logging.getLogger("headway.engines")  # told at the terminal, too


class LaunchedEngines:
    """`engine-0` to `engine-<count - 1>`, as children. `closers` end them, whatever happens."""

    def __init__(self, config: Config, directory: RunDirectory, first: Checkpoint, closers: Closers) -> None:
        self._config = config
        self._directory = directory
        self._first = first
        self._closers = closers
        self._ports: Ports | None = None
        self._engines: dict[int, Supervisor] = {}
        self._given_up = 0

    @property
    def restarts(self) -> int:
        """How often engines were started again."""
        return sum(engine.restarts for engine in self._engines.values())

    async def starts(self, *, resumed: bool) -> list[Start]:
        """Take the ports, and return what starts the engines. `resumed`: a process before may have them yet. Raises ConfigError."""
        engine = self._config.engine
        if engine.launch == "none":
            return []
        self._ports = await Ports.reserve(engine.count, engine.port, patience_seconds=PREDECESSOR_SECONDS if resumed else 0.0)
        self._closers.add_blocking("the ports of the engines", self._ports.close)
        return [Start(f"engine-{index}", partial(self._begin, index), engine.start_timeout_seconds) for index in range(engine.count)]

    def addresses(self) -> list[EngineAddress]:
        """Return where the engines are, in the order of their names."""
        assert self._ports is not None  # noqa: S101  set by `starts`
        return [
            EngineAddress(f"http://{LOOPBACK}:{self._ports[index]}", kind_of(self._config.engine)) for index in range(len(self._engines))
        ]

    async def keep_alive(self, pool: EnginePool) -> None:
        """Start engines again when they die. One that is given up is gone without; raises what the last one is given up for."""
        async with asyncio.TaskGroup() as keeping:
            for index, engine in self._engines.items():
                keeping.create_task(self._keep(index, engine, pool), name=f"keep {engine.child.name} alive")

    async def _keep(self, index: int, engine: Supervisor, pool: EnginePool) -> None:
        """Keep one alive, with the weights that are served. Dead, it is lost to the pool until the probe finds it with the right ones."""
        name = f"engine-{index}"
        try:
            await engine.run(
                again=lambda: self._new(index, pool.weights or self._first),
                progress=lambda: pool.deeds(name),
                died=lambda error: pool.lost(name, error),
                meanwhile=lambda: pool.returning(name),
            )
        except EngineFailed as error:
            self._given_up += 1
            if self._given_up == len(self._engines):
                raise
            pool.lost(name, error)
            _log.error("%s. It is given up; the run goes on with %d of %d", error, len(self._engines) - self._given_up, len(self._engines))

    async def _begin(self, index: int) -> ChildProcess:
        engine = self._config.engine
        if is_foreign(engine):
            await self._first_version()
        child = await self._new(index, self._first)
        supervisor = self._engines[index] = Supervisor(
            child, max_restarts=engine.max_restarts, setting="engine.max_restarts", start_timeout_seconds=engine.start_timeout_seconds
        )
        self._closers.add(child.name, supervisor.stop, STOP_SECONDS)
        return child

    async def _new(self, index: int, weights: Checkpoint) -> ChildProcess:
        assert self._ports is not None  # noqa: S101  set by `starts`
        launch = launch_of(self._config, index, port=self._ports[index], weights=weights)
        return await ChildProcess.start(
            f"engine-{index}",
            launch.command,
            log=self._directory.logs / f"engine-{index}.log",
            error=EngineFailed,
            threads=launch.threads,
            foreign=is_foreign(self._config.engine),
            environment=launch.environment,
        )

    async def _first_version(self) -> None:
        """Wait for a version that the trainer makes: such a server wants its model to be there. An embedded engine waits by itself."""
        directory = Path(self._first.directory)
        if directory.parent != self._directory.weights:
            return
        limit = self._config.trainer.start_timeout_seconds
        try:
            async with asyncio.timeout(limit):
                while not (directory / MANIFEST).exists():  # noqa: ASYNC110  (another process writes the directory)
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            raise TrainerFailed(f"{directory}: no complete version within trainer.start_timeout_seconds ({limit:g} s)") from None
