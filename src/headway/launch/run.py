"""Plays a run from a config to an exit code: directory, children, orchestrator, signals, and the order in which all of it ends.

Children start together (importing torch takes longest) and are watched from then on: one that ends ends the run with its cause. SIGINT and
SIGTERM ask the run to drain; a second one stops it now. Whatever happens, children are gone and `run.json` says how it ended.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from headway import __version__
from headway.adapters.exporters.console import ConsoleExporter
from headway.adapters.exporters.jsonl import JsonlExporter
from headway.config import resolved
from headway.errors import EngineFailed, HeadwayError, TrainerFailed, first_cause
from headway.formats.files import storage_errors, write_atomically
from headway.formats.run_directory import Ending, RunDirectory, RunInfo, save_run_info
from headway.launch import build
from headway.launch.processes import ChildProcess
from headway.orchestrator import Orchestrator, Parts
from headway.settings import Config
from headway.types import Checkpoint

_log = logging.getLogger("headway")
_STOP_SECONDS = 10.0  # what a child gets to end by itself; everything important is on disk by then


class Interrupted(HeadwayError):
    """A signal stopped the run before it had drained."""


def run(config: Config, *, config_path: Path, progress: bool = True) -> int:
    """Play the run; return 0 when it reached its end, 130 / 143 when a signal ended it in order. Raises HeadwayError otherwise."""
    directory = build.new_run_directory(config)
    try:
        lineage = secrets.token_hex(3)
        info = RunInfo(
            id=secrets.token_hex(8),
            lineage=lineage,
            headway_version=__version__,
            engine_version=f"headway-{__version__}" if config.engine.launch == "embedded" else config.engine.kind,
            trainer_version=f"headway-{__version__}" if config.trainer.kind == "embedded" else config.trainer.kind,
            seed=config.run.seed,
            created=time.time(),
        )
        with storage_errors(f"{directory.config}: cannot be written"):
            write_atomically(directory.config, resolved(config).encode())
        save_run_info(directory, info)  # last: who finds run.json finds the rest
        handler = _log_to(directory)
        try:
            code, cause, error = _played(_Run(config, directory, info, config_path.resolve().parent, progress=progress).play())
            ending = Ending(code, cause, time.time())
            save_run_info(directory, msgspec.structs.replace(info, ended=ending))
            _log.info("ended with exit code %d: %s", code, cause)
        finally:
            _log.removeHandler(handler)
            handler.close()
        if error is not None:
            raise error
        print(f"{cause}. The run is in {directory.path}")  # noqa: T201  the last line is for the person at the terminal
        return code
    finally:
        directory.close()


def _played(main: Coroutine[Any, Any, tuple[int, str]]) -> tuple[int, str, BaseException | None]:
    """Run the loop; return (exit code, cause, the error to raise on, if any)."""
    # Rollouts in flight are many objects that live for seconds: by default the collector would walk all of them again and
    # again (half of the orchestrator's time at 8,192 in flight).
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            code, cause = runner.run(main)
    except Exception as error:  # noqa: BLE001  recorded in run.json, then raised on
        leaf = first_cause(error)
        code = leaf.exit_code if isinstance(leaf, HeadwayError) else 1
        return code, f"{type(leaf).__name__}: {leaf}", error
    return code, cause, None


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Run:
    """The pieces of one run while it plays."""

    def __init__(self, config: Config, directory: RunDirectory, info: RunInfo, base: Path, *, progress: bool) -> None:
        self._config = config
        self._directory = directory
        self._info = info
        self._base = base
        self._progress = progress
        self._signals: list[signal.Signals] = []
        self._orchestrator: Orchestrator | None = None
        self._children: list[ChildProcess] = []

    async def play(self) -> tuple[int, str]:
        """Start everything, run, end everything; return exit code and cause."""
        me = asyncio.current_task()
        assert me is not None  # noqa: S101  asyncio.run made it
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number, me)
        try:
            async with AsyncExitStack() as stack:
                cause = await self._orchestrate(stack)
        except asyncio.CancelledError:
            if not self._signals:
                raise
            cause = f"stopped by {self._signals[-1].name} before it had drained"
            error = Interrupted(cause)
            error.exit_code = 128 + self._signals[0]
            raise error from None
        return (128 + self._signals[0] if self._signals else 0), cause

    def _signalled(self, number: signal.Signals, main: asyncio.Task[Any]) -> None:
        self._signals.append(number)
        if len(self._signals) == 1 and self._orchestrator is not None:
            _log.warning("%s: draining (at most %g s); once more stops now", number.name, self._config.run.drain_timeout_seconds)
            print(f"\n{number.name}: draining; once more stops now", file=sys.stderr)  # noqa: T201  for the person at the terminal
            self._orchestrator.drain(f"interrupted by {number.name}")
        else:
            main.cancel()

    async def _orchestrate(self, stack: AsyncExitStack) -> str:
        config, directory, lineage = self._config, self._directory, self._info.lineage
        first = build.first_checkpoint(config, directory, lineage)
        prompts = build.prompts_of(config, self._base)
        evaluation = config.eval
        eval_prompts = await build.eval_prompts_of(config, evaluation, self._base) if evaluation else ()
        advantages, keep = build.advantages_of(config, self._base), build.filter_of(config, self._base)
        journal = build.journal_of(config, self._info.id)
        stack.push_async_callback(journal.close)
        urls, trainer_child = await self._start_children(stack, first)
        if trainer_child is None and config.model.init is not None:
            await self._await_external_start(first)
        engines = build.engines_of(config, urls)
        for engine in engines:
            stack.push_async_callback(engine.close)
        worker = await build.worker_of(config, directory, lineage, first, self._base)
        stack.push_async_callback(worker.close)
        console = ConsoleExporter(config.metrics.progress if self._progress else "none", sys.stderr)
        stack.callback(console.close)
        parts = Parts(
            prompts=prompts,
            worker=worker,
            engines=engines,
            trainer=build.trainer_of(config, directory, lineage, trainer_child.failure if trainer_child else lambda: None),
            store=build.store_of(directory, lineage),
            journal=journal,
            exporters=[JsonlExporter(directory), console],
            first=first,
            advantages=advantages,
            keep=keep,
            eval_prompts=eval_prompts,
            services=[child.watch for child in self._children],
        )
        self._orchestrator = Orchestrator(
            parts,
            run=config.run,
            rollout=config.rollout,
            environment=config.environment,
            evaluation=evaluation,
            metrics=config.metrics,
        )
        if self._signals:  # a signal that came while everything started
            raise asyncio.CancelledError
        return await self._orchestrator.run()

    async def _start_children(self, stack: AsyncExitStack, first: Checkpoint) -> tuple[list[str], ChildProcess | None]:
        """Start trainer and engine together; return the engines' addresses, and the trainer if it is a child."""
        config, logs = self._config, self._directory.logs
        headway = [sys.executable, "-m", "headway"]
        trainer = engine = None
        if config.trainer.kind == "embedded":
            command = [*headway, "trainer", "--run", str(self._directory.path)]
            trainer = await ChildProcess.start(
                "trainer", command, log=logs / "trainer.log", error=TrainerFailed, threads=_threads(config.trainer.threads)
            )
            self._children.append(trainer)
            stack.push_async_callback(trainer.stop, _STOP_SECONDS)
        if config.engine.launch == "embedded":
            engine = await ChildProcess.start(
                "engine-0",
                [*headway, "engine", *_engine_arguments(config, first)],
                log=logs / "engine-0.log",
                error=EngineFailed,
                threads=_threads(config.engine.threads),
            )
            self._children.append(engine)
            stack.push_async_callback(engine.stop, _STOP_SECONDS)
        facts = await self._all_ready([(trainer, config.trainer.start_timeout_seconds), (engine, config.engine.start_timeout_seconds)])
        urls = list(config.engine.urls) if engine is None else [str(facts[engine.name]["url"])]
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

    async def _await_external_start(self, first: Checkpoint) -> None:
        """Wait for the version 0 that a trainer of the user's makes."""
        limit = self._config.trainer.start_timeout_seconds
        trainer = build.trainer_of(self._config, self._directory, self._info.lineage, lambda: None)
        try:
            async with asyncio.timeout(limit):
                await trainer.checkpoint(-1)
        except TimeoutError:
            raise TrainerFailed(f"{first.directory}: no complete version 0 within trainer.start_timeout_seconds ({limit:g} s)") from None


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


def _threads(asked: int) -> int:
    """Return the thread limit of a child: as asked, one on small CPUs, and no limit (0) elsewhere."""
    return asked or (1 if (os.cpu_count() or 1) <= 4 else 0)


def _log_to(directory: RunDirectory) -> logging.Handler:
    handler = logging.FileHandler(directory.events_log, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    return handler
