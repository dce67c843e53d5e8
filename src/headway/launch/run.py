"""Plays a run from a config to an exit code: directory, children, orchestrator, signals, and the order in which all of it ends.

What the user gives is read first: bad input uses up no run directory. Children start together (importing torch takes longest) and are
watched from then on: one that ends ends the run with its cause. SIGINT and SIGTERM ask the run to drain; a second one, or one that comes
before it runs, stops it now. Whatever happens, children are gone and `run.json` says how it ended.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from headway import __version__
from headway.adapters.exporters.console import ConsoleExporter
from headway.adapters.exporters.jsonl import JsonlExporter
from headway.config import resolved
from headway.errors import HeadwayError, StorageError, TrainerFailed, first_cause
from headway.formats.files import storage_errors, write_atomically
from headway.formats.run_directory import Ending, RunDirectory, RunInfo, save_run_info
from headway.launch import build
from headway.launch.children import Children
from headway.orchestrator import Orchestrator, Parts
from headway.settings import Config
from headway.types import Checkpoint

_log = logging.getLogger("headway")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(HeadwayError):
    """A signal stopped the run before it had drained."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name} before it had drained")
        self.exit_code = 128 + number


def run(config: Config, *, config_path: Path) -> int:
    """Play the run; return 0 when it reached its end, 130 / 143 when a signal ended it in order. Raises HeadwayError otherwise."""
    base = config_path.resolve().parent
    with _interruptible():
        inputs = build.inputs_of(config, base)
        directory = build.new_run_directory(config)
        try:
            info = _info(config)
            with storage_errors(f"{directory.config}: cannot be written"):
                write_atomically(directory.config, resolved(config).encode())
            save_run_info(directory, info)  # last: who finds run.json finds the rest
            return _recorded(directory, info, _Run(config, directory, info, base, inputs).play())
        finally:
            directory.close()


def _info(config: Config) -> RunInfo:
    return RunInfo(
        id=secrets.token_hex(8),
        lineage=secrets.token_hex(3),
        headway_version=__version__,
        engine_version=f"headway-{__version__}" if config.engine.launch == "embedded" else config.engine.kind,
        trainer_version=f"headway-{__version__}" if config.trainer.kind == "embedded" else config.trainer.kind,
        seed=config.run.seed,
        created=time.time(),
    )


def _recorded(directory: RunDirectory, info: RunInfo, main: Coroutine[Any, Any, tuple[int, str]]) -> int:
    """Play `main` and record how it ended; return the exit code or raise on."""
    handler = _log_to(directory)
    try:
        code, cause, error = _played(main)
        try:
            save_run_info(directory, msgspec.structs.replace(info, ended=Ending(code, cause, time.time())))
        except StorageError as unrecorded:
            if error is None:
                raise
            error.add_note(str(unrecorded))  # a full disk may be behind both: what ended the run is told
        _log.info("ended with exit code %d: %s", code, cause, exc_info=None if isinstance(error, HeadwayError) else error)
    finally:
        _log.removeHandler(handler)
        handler.close()
    if error is not None:
        raise error
    with suppress(OSError):  # who reads may have gone; run.json tells it too
        print(f"{cause}. The run is in {directory.path}", flush=True)  # noqa: T201  the last line is for the person at the terminal
    return code


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise Interrupted wherever the main thread is, in blocking user code too, until the event loop takes over."""
    seen: list[signal.Signals] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        seen.append(signal.Signals(number))
        raise Interrupted(seen[0])

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    except Exception as error:
        if not seen or isinstance(error, Interrupted):
            raise
        raise Interrupted(seen[0]) from error  # who was interrupted took it for an error of something that it called
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _played(main: Coroutine[Any, Any, tuple[int, str]]) -> tuple[int, str, BaseException | None]:
    """Run the loop; return (exit code, cause, the error to raise on, if any). From then on it is too late for signals."""
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
        return code, f"{type(leaf).__name__}: {leaf}".partition("\n")[0], leaf if isinstance(leaf, HeadwayError) else error
    finally:
        main.close()  # where the loop did not get to it
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
    return code, cause, None


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Run:
    """The pieces of one run while it plays."""

    def __init__(self, config: Config, directory: RunDirectory, info: RunInfo, base: Path, inputs: build.Inputs) -> None:
        self._config = config
        self._directory = directory
        self._info = info
        self._base = base
        self._inputs = inputs
        self._signals: list[signal.Signals] = []
        self._orchestrator: Orchestrator | None = None

    async def play(self) -> tuple[int, str]:
        """Start everything, run, end everything; return exit code and cause."""
        me = asyncio.current_task()
        assert me is not None  # noqa: S101  asyncio.run made it
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled, number, me)
        try:
            async with AsyncExitStack() as stack:
                cause = await self._orchestrate(stack)
        except asyncio.CancelledError:
            if not self._signals:
                raise
            raise Interrupted(self._signals[0]) from None
        return (128 + self._signals[0] if self._signals else 0), cause

    def _signalled(self, number: signal.Signals, main: asyncio.Task[Any]) -> None:
        self._signals.append(number)
        if len(self._signals) == 1 and self._orchestrator is not None:
            _log.warning("%s: draining (at most %g s); once more stops now", number.name, self._config.run.drain_timeout_seconds)
            self._orchestrator.drain(f"interrupted by {number.name}")
            with suppress(OSError):
                print(f"\n{number.name}: draining; once more stops now", file=sys.stderr)  # noqa: T201  for the person at the terminal
        else:
            main.cancel()

    async def _orchestrate(self, stack: AsyncExitStack) -> str:
        config, directory, lineage = self._config, self._directory, self._info.lineage
        first = build.first_checkpoint(config, directory, lineage)
        inputs = self._inputs
        journal = build.journal_of(config, self._info.id)
        stack.push_async_callback(journal.close)
        children = Children(config, directory, stack)
        urls, trainer_child = await children.start(first)
        if trainer_child is None and config.model.init is not None:
            await self._await_external_start(first)
        engines = build.engines_of(config, urls)
        for engine in engines:
            stack.push_async_callback(engine.close)
        worker = await build.worker_of(config, directory, lineage, first, self._base)
        stack.push_async_callback(worker.close)
        console = ConsoleExporter(config.metrics.progress, sys.stderr)
        stack.callback(console.close)
        limits = build.sample_limits(config, first)
        parts = Parts(
            prompts=inputs.prompts,
            worker=worker,
            engines=engines,
            trainer=build.trainer_of(config, directory, lineage, trainer_child.failure if trainer_child else lambda: None),
            store=build.store_of(directory, lineage),
            journal=journal,
            exporters=[JsonlExporter(directory), console],
            first=first,
            advantages=inputs.advantages,
            keep=inputs.keep,
            eval_prompts=inputs.eval_prompts,
            replayed=build.replay_of(config, self._base, limits),
            listen=build.ingest_of(config, directory, limits),
            services=[child.watch for child in children.all],
        )
        self._orchestrator = Orchestrator(
            parts,
            run=config.run,
            rollout=config.rollout,
            environment=config.environment,
            evaluation=config.eval,
            metrics=config.metrics,
            debug=config.debug,
        )
        if self._signals:  # a signal that came while everything started
            raise asyncio.CancelledError
        return await self._orchestrator.run()

    async def _await_external_start(self, first: Checkpoint) -> None:
        """Wait for the version 0 that a trainer of the user's makes."""
        limit = self._config.trainer.start_timeout_seconds
        trainer = build.trainer_of(self._config, self._directory, self._info.lineage, lambda: None)
        try:
            async with asyncio.timeout(limit):
                await trainer.checkpoint(-1)
        except TimeoutError:
            raise TrainerFailed(f"{first.directory}: no complete version 0 within trainer.start_timeout_seconds ({limit:g} s)") from None


class _EventLog(logging.FileHandler):
    """The log for people. Lines that a full disk has no room for are lost, and nothing else with them."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Let the line go."""

    def close(self) -> None:
        """Close the file; idempotent."""
        with suppress(OSError):
            super().close()


def _log_to(directory: RunDirectory) -> logging.Handler:
    handler = _EventLog(directory.events_log, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    return handler
