"""Plays a run from a config to an exit code: directory, children, orchestrator. How it ends: `headway.launch.ending`.

What the user gives is read first: bad input uses up no run directory. Children start together (importing torch takes longest) and are
watched from then on: one that dies is started again, or ends the run with its cause. Whatever happens, children are gone and `run.json`
says how it ended.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from headway import __version__
from headway.config import resolved
from headway.errors import StorageError, TrainerFailed, kind_of
from headway.flow.engine_pool import EnginePool
from headway.flow.take_up import Resumption
from headway.formats.files import storage_errors, write_atomically
from headway.formats.hold import Hold
from headway.formats.run_directory import Ending, RunDirectory, RunInfo, load_run_info, save_run_info
from headway.formats.software import OURS, UNKNOWN
from headway.launch import build
from headway.launch.access import engine_access
from headway.launch.children import Children
from headway.launch.ending import Ends
from headway.launch.exporters import open_exporters
from headway.launch.interrupts import Interrupted, interruptible
from headway.launch.record import RunRecord
from headway.launch.resume import Resume
from headway.launch.servers import check_servers, is_foreign
from headway.open_files import allow_many
from headway.orchestrator import Orchestrator, Parts, Sections
from headway.parts import Service
from headway.protocols import Engine, Journal
from headway.settings import Config
from headway.types import Checkpoint, EngineAddress


def run(config: Config, *, config_path: Path, resume: bool = False) -> int:
    """Play the run; return 0 when it reached its end, 130 / 143 when a signal ended it in order. Raises HeadwayError otherwise.

    `resume`: take up the run that lies in the run directory; where there is none, start it.
    """
    base = config_path.resolve().parent
    allow_many()  # environment.workers = 0: the connections are this process's
    with interruptible(), engine_access(config):
        inputs = build.inputs_of(config, base)
        check_servers(config)
        directory = build.used_run_directory(config) if resume else None
        if directory is not None:
            with owned(directory):
                before = load_run_info(directory)
                taking_up = Resume(config, directory, before, _info(config))
                return _Run(config, directory, before, base, inputs, taking_up).play()
        directory = build.new_run_directory(config)
        if resume:
            print(f"nothing to take up in {directory.path}: the run starts", flush=True)  # noqa: T201  for the person at the terminal
        with owned(directory):
            info = _info(config)
            with storage_errors(f"{directory.config}: cannot be written"):
                write_atomically(directory.config, resolved(config).encode())
            save_run_info(directory, info)  # last: who finds run.json finds the rest
            return _Run(config, directory, info, base, inputs).play()


@contextmanager
def owned(directory: RunDirectory) -> Iterator[None]:
    """Close the directory at the end; a run that a signal stops before its `Ends` hear of signals has an ending in run.json, too."""
    try:
        yield
    except Interrupted as stopped:
        with suppress(StorageError):  # there is no run.json yet: nothing has happened
            info = load_run_info(directory)
            if info.ended is None:
                ending = Ending(stopped.exit_code, f"{type(stopped).__name__}: {stopped}", time.time(), kind_of(stopped))
                save_run_info(directory, msgspec.structs.replace(info, ended=ending))
        raise
    finally:
        directory.close()


def _info(config: Config) -> RunInfo:
    lineage = secrets.token_hex(3)
    return RunInfo(
        id=secrets.token_hex(8),
        lineage=lineage,
        lineages={lineage: None},
        headway_version=__version__,
        engine_version=OURS if config.engine.launch == "embedded" else UNKNOWN,
        trainer_version=OURS if config.trainer.kind == "embedded" else UNKNOWN,
        seed=config.run.seed,
        created=time.time(),
    )


class _Run:
    """The pieces of one run while it plays."""

    def __init__(
        self, config: Config, directory: RunDirectory, info: RunInfo, base: Path, inputs: build.Inputs, resume: Resume | None = None
    ) -> None:
        self._resume = resume
        self._config = config
        self._directory = directory
        self._record = RunRecord(directory, info)
        self._saves = True
        self._base = base
        self._inputs = inputs

    def play(self) -> int:
        """Start everything, run, end everything; return the exit code."""
        directory = self._directory
        return Ends(self._config, path=directory.path, log=directory.events_log, save=self._save_ending).play(self._orchestrate)

    def _save_ending(self, ending: Ending) -> None:
        if self._saves:
            self._record.end(ending)

    async def _orchestrate(self, ends: Ends) -> str:
        ends.journal = journal = build.journal_of(
            self._config, self._record.info.id, taken_up=None if self._resume is None else self._directory
        )
        resumed: Resumption | None = None
        if self._resume is not None:
            history = await self._resume.history(journal)
            if why := await self._resume.nothing_left(history, partial(build.prompts_of, self._config, self._base)):
                self._saves = False
                return f"nothing to do: {why}"
            taken_up = await self._resume.take_up(journal, history, self._inputs)
            self._record.info, first, resumed = taken_up.info, taken_up.first, taken_up.resumption
        else:
            first = build.first_checkpoint(self._config, self._directory, self._record.info.lineage)
        return await self._play(ends, journal, first, resumed)

    async def _play(self, ends: Ends, journal: Journal, first: Checkpoint, resumed: Resumption | None) -> str:
        config, directory, lineage, inputs = self._config, self._directory, self._record.info.lineage, self._inputs
        # A trainer that finds batches to ship again goes on at once, and would retire these weights before an engine has loaded them.
        kept = Hold(Path(first.directory))
        ends.closers.add_blocking("the hold on the first weights", kept.release)
        if is_foreign(config.engine):  # headway's own waits by itself, and loads its libraries meanwhile
            await self._await_external_start(first)
        children = Children(config, directory, first, ends.closers)
        launched = await children.start(resumed=resumed is not None)
        await self._await_external_start(first)
        engines = build.engines_of(config, launched)
        for engine in engines:
            ends.closers.add(f"the client of {engine.name}", engine.close)
        worker = await build.worker_of(config, directory, lineage, first, self._base)
        ends.closers.add("the rollout workers", worker.close)
        limits = build.sample_limits(config, first)
        parts = Parts(
            prompts=inputs.prompts,
            worker=worker,
            engines=engines,
            roster=build.roster_of(config),
            make_engine=partial(self._guest, ends),
            trainer=build.trainer_of(config, directory, lineage, children.failure, self._record.trainer_is),
            store=build.store_of(directory, lineage),
            journal=journal,
            exporters=open_exporters(config, directory, inputs.exporters, ends.closers),
            first=first,
            advantages=inputs.advantages,
            keep=inputs.keep,
            eval_prompts=inputs.eval_prompts,
            resumed=resumed,
            replayed=build.replay_of(config, self._base, limits, None if resumed is None else resumed.replayed),
            listen=build.ingest_of(config, directory, limits),
            services=[self._record.keep],
            supervise=[lambda pool: partial(children.keep_alive, pool), *self._met],
            restarts=lambda: children.restarts() | build.worker_restarts(worker),
            failing=ends.failing,
            loop_lag=ends.loop.lag,
            free_space=build.free_space_of(config, directory),
            retire_batches=build.retirement_of(directory),
            served=kept.release,
        )
        orchestrator = Orchestrator(parts, Sections.of(config))
        ends.runs(orchestrator)
        return await orchestrator.run()

    @property
    def _met(self) -> list[Callable[[EnginePool], Service]]:
        """What asks engines for their software; headway's own is known."""
        return [] if self._config.engine.launch == "embedded" else [lambda pool: partial(self._record.meet, pool)]

    def _guest(self, ends: Ends, name: str, address: EngineAddress) -> Engine:
        """Make the client of an engine that joins; it is closed at the end, if not before."""
        engine = build.make_engine_of(self._config)(name, address)
        ends.closers.add(f"the client of {name}", engine.close)
        return engine

    async def _await_external_start(self, first: Checkpoint) -> None:
        """Wait for the version 0 that a trainer of the user's makes, where it is to make one."""
        if self._config.trainer.kind == "embedded" or self._config.model.init is None or Path(first.directory).exists():
            return
        limit = self._config.trainer.start_timeout_seconds
        trainer = build.trainer_of(self._config, self._directory, self._record.info.lineage, lambda: None, self._record.trainer_is)
        try:
            async with asyncio.timeout(limit):
                await trainer.checkpoint(-1)
        except TimeoutError:
            raise TrainerFailed(f"{first.directory}: no complete version 0 within trainer.start_timeout_seconds ({limit:g} s)") from None
