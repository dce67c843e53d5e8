"""Engine and trainer as children of a run: started together (importing torch takes longest), ready together, ended with the run."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Any

from headway.errors import EngineFailed, TrainerFailed
from headway.formats.run_directory import RunDirectory
from headway.launch.closers import Closers
from headway.launch.processes import ChildProcess
from headway.secrecy import without_login
from headway.settings import Config, thread_limit
from headway.types import Checkpoint

_log = logging.getLogger("headway")
_STOP_SECONDS = 10.0  # what a child gets to end by itself; everything important is on disk by then


class Children:
    """The child processes that a config asks for. `closers` end them, whatever happens; `all` are those that run."""

    def __init__(self, config: Config, directory: RunDirectory, closers: Closers) -> None:
        self.all: list[ChildProcess] = []
        self._config = config
        self._directory = directory
        self._closers = closers

    async def start(self, first: Checkpoint) -> tuple[list[str], ChildProcess | None]:
        """Start trainer and engine together; return the engines' addresses, and the trainer if it is a child."""
        config, logs = self._config, self._directory.logs
        headway = [sys.executable, "-m", "headway"]
        trainer = engine = None
        if config.trainer.kind == "embedded":
            command = [*headway, "trainer", "--run", str(self._directory.path)]
            trainer = await ChildProcess.start(
                "trainer",
                command,
                log=logs / "trainer.log",
                error=TrainerFailed,
                threads=thread_limit(config.trainer.threads),
                may_end=True,  # when all steps are trained; before, who waits for the next version is told (DirectoryTrainer)
            )
            self.all.append(trainer)
            self._closers.add(trainer.name, trainer.stop, _STOP_SECONDS)
        if config.engine.launch == "embedded":
            engine = await ChildProcess.start(
                "engine-0",
                [*headway, "engine", *_engine_arguments(config, first)],
                log=logs / "engine-0.log",
                error=EngineFailed,
                threads=thread_limit(config.engine.threads),
            )
            self.all.append(engine)
            self._closers.add(engine.name, engine.stop, _STOP_SECONDS)
        facts = await self._all_ready([(trainer, config.trainer.start_timeout_seconds), (engine, config.engine.start_timeout_seconds)])
        urls = [without_login(url) for url in config.engine.urls] if engine is None else [str(facts[engine.name]["url"])]
        return urls, trainer

    async def _all_ready(self, children: Sequence[tuple[ChildProcess | None, float]]) -> dict[str, dict[str, Any]]:
        """Wait until all are ready; the first that ends before is raised at once, whatever the others still do."""
        facts: dict[str, dict[str, Any]] = {}

        async def one(child: ChildProcess, timeout_seconds: float) -> None:
            facts[child.name] = await child.ready(timeout_seconds)
            _log.info("%s is ready: %s", child.name, facts[child.name])

        async with asyncio.TaskGroup() as starting:
            watching = [starting.create_task(child.watch(), name=f"watch {child.name}") for child, _ in children if child]
            ready = [starting.create_task(one(child, limit), name=f"start {child.name}") for child, limit in children if child]
            if ready:
                await asyncio.wait(ready)
            for task in watching:
                task.cancel()
        return facts


def _engine_arguments(config: Config, first: Checkpoint) -> list[str]:
    engine = config.engine
    options = {
        "model": first.directory,
        "port": engine.port,
        "device": engine.device,
        "dtype": engine.dtype,
        "max-sequences": engine.max_sequences,
        "max-context-tokens": engine.max_context_tokens,
        "threads": engine.threads,
        "label": first.label,
        "await-model-seconds": engine.start_timeout_seconds,
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]
