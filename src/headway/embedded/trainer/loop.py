"""The trainer process: version 0, then batch after batch into version after version, until the run has its steps or ends.

For each batch k: wait for `batches/<k>`, verify it, pass it through the double lock, train, write `trainer/metrics/<k>.json`, then
`trainer/<k+1>`, then `weights/<k+1>`, whose rename is the commit. Every version is committed, also those that `trainer.publish_every` keeps
from the engines: the next batches wait for them, and a run that drains waits for its last, which nobody knows beforehand. Killed at any
moment, the next start goes on from the newest committed version and trains the same batch exactly as if nothing had happened. Nothing here
knows an orchestrator: files come, files go.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from functools import partial
from pathlib import Path

import msgspec
import torch

from headway.embedded.threads import configure_torch
from headway.embedded.trainer.checkpoints import Checkpoints
from headway.embedded.trainer.guard import TrainingBatch, admit
from headway.embedded.trainer.initialise import SideFiles, load_model, random_model
from headway.embedded.trainer.offering import Offering
from headway.embedded.trainer.scoring import Policy, self_test
from headway.embedded.trainer.step import Interrupted, learning_rate, make_optimiser, train
from headway.errors import ConfigError
from headway.formats.batch import read_batch
from headway.formats.bounded import read_regular
from headway.formats.files import storage_errors, strict_json, write_atomically
from headway.formats.hold import alone
from headway.formats.manifest import read_manifest
from headway.formats.run_directory import RunDirectory, load_run_info
from headway.formats.shared_memory import clear, memory_of
from headway.lifeline import Lifeline, at_last
from headway.settings import Config

_log = logging.getLogger(__name__)


def serve(directory: Path) -> None:
    """Train the run in `directory` (its config.toml and run.json) until `run.steps` versions exist, SIGTERM comes, or the parent is gone.

    A step in progress is abandoned between two packs; a commit in progress is finished. Nothing half-written is left. Call from the main
    thread: it takes SIGTERM, and SIGINT where there is no parent to say when to end.

    Raises:
        HeadwayError: by name, whatever ends training badly; the process should end with its exit_code.
    """
    stop = threading.Event()
    lifeline = Lifeline.from_environment()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, (lambda *_: stop.set()) if lifeline is None else signal.SIG_IGN)
    if lifeline is not None:
        lifeline.watch(stop.set)
    run = RunDirectory(directory)
    with storage_errors(f"{run.trainer}: cannot be made"):
        run.trainer.mkdir(parents=True, exist_ok=True)
    with alone(run.trainer_lock, stopped=stop.is_set) as had:
        if not had:
            return
        info = load_run_info(run)
        config = _config(run)
        if config.engine.weight_transfer == "memory":
            at_last(partial(clear, memory_of(info.id)))
        trainer = Trainer(run, config, lineage=info.lineage, run_id=info.id)
        try:
            if lifeline is not None:
                lifeline.ready(version=trainer.version)
            trainer.run(stop)
            if lifeline is not None and trainer.offers_memory:
                stop.wait()  # engines may be taking the last version yet
        finally:
            trainer.close()


def _config(run: RunDirectory) -> Config:
    """Read the resolved config of a run."""
    try:
        return msgspec.toml.decode(read_regular(run.config), type=Config)
    except OSError as error:
        raise ConfigError(f"{run.config}: cannot be read: {error.strerror}: name the directory of a run that was started") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{run.config}: is no resolved config of this headway: {error}") from error


class Trainer:
    """A policy, its optimiser and the version they are at. Constructing one makes version 0 exist, or takes up the newest version."""

    def __init__(self, run: RunDirectory, config: Config, *, lineage: str, run_id: str = "") -> None:
        self._run = run
        self._settings = config.trainer
        self._rollout = config.rollout
        self._steps = config.run.steps
        self._lineage = lineage
        device = configure_torch(self._settings.threads, self._settings.device)
        torch.manual_seed(config.run.seed)
        self._offering = Offering(
            run,
            config.engine.weight_transfer,
            lineage=lineage,
            run_id=run_id or lineage,
            serves=lambda version: version % config.trainer.publish_every == 0 or version >= config.run.steps,
        )
        keep, keep_every = self._settings.keep_checkpoints, self._settings.keep_every
        self._checkpoints = Checkpoints(run, self._offering, lineage=lineage, keep=keep, keep_every=keep_every)
        newest = self._checkpoints.newest()
        self.version = newest or 0
        self._checkpoints.clear_after(self.version)
        given = Path(config.model.path) if config.model.path else None
        self._offering.start(self.version, given if newest is None else run.weight(newest))
        model, self._side_files = self._model(config, newest)
        self._policy = Policy(model, device, getattr(torch, self._settings.dtype))
        self._optimiser = make_optimiser(self._policy, self._settings)
        difference = self_test(self._policy)
        if newest is None and config.model.init is not None:
            self._checkpoints.publish_weights(0, self._policy, self._side_files)
        elif newest:
            self._checkpoints.restore_state(newest, self._policy, self._optimiser)
        run.trainer_metrics.mkdir(parents=True, exist_ok=True)
        _log.info("at version %d; packed and unpacked log-probabilities differ by %.1g", self.version, difference)

    def _model(self, config: Config, newest: int | None) -> tuple[torch.nn.Module, SideFiles]:
        if newest is not None:
            return load_model(self._checkpoints.verified_weights(newest))
        if config.model.init is not None:
            model, files = random_model(config.model.init, config.run.seed)
            with torch.no_grad():  # version 0 is what is published of it: who starts again from there has no more
                for parameter in model.parameters():
                    parameter.copy_(parameter.to(getattr(torch, self._settings.dtype)))
            return model, files
        if config.model.path:
            return load_model(Path(config.model.path))
        raise ConfigError("[model]: neither path nor init is set: give one of them")

    @property
    def offers_memory(self) -> bool:
        """Whether engines take versions from memory that `close` clears."""
        return self._offering.in_memory

    def close(self) -> None:
        """Leave nothing in shared memory; idempotent."""
        self._offering.close()

    def run(self, stop: threading.Event) -> None:
        """Train until the run has its steps or `stop` is set."""
        while self.version < self._steps and not stop.is_set():
            started = time.monotonic()
            batch = self._next(stop)
            if batch is None:
                break
            try:
                self.step(batch, waited_seconds=time.monotonic() - started, stop=stop)
            except Interrupted:
                _log.info("batch %d abandoned: the run ends", batch.k)
                return

    def _next(self, stop: threading.Event) -> TrainingBatch | None:
        """Wait for the batch of the trainer's version and pass it through the double lock; None when `stop` is set first."""
        directory = self._run.batch(self.version)
        foreign = False
        while not stop.is_set():
            # One stat while there is nothing: a batch appears whole, by rename.
            manifest = read_manifest(directory) if directory.exists() else None
            if manifest is not None and manifest.lineage == self._lineage:
                return admit(read_batch(directory), version=self.version, vocabulary=self._policy.vocabulary, rollout=self._rollout)
            if manifest is not None and not foreign:
                _log.warning("%s: is of lineage %s, not %s: waiting for this run's own", directory, manifest.lineage, self._lineage)
                foreign = True
            stop.wait(self._settings.poll_seconds)
        return None

    def step(self, batch: TrainingBatch, *, waited_seconds: float, stop: threading.Event) -> None:
        """Train on a batch, and commit the version it makes."""
        started = time.monotonic()
        rate = learning_rate(self._settings, batch.k, self._steps)
        measured = train(self._policy, self._optimiser, batch, self._settings, rate=rate, interrupted=stop.is_set)
        measured |= {"batch": batch.k, "step_seconds": time.monotonic() - started, "waited_seconds": waited_seconds}
        path = self._run.trainer_metric(batch.k)
        with storage_errors(f"{path}: cannot be written"):
            write_atomically(path, strict_json(measured))
        self.version = batch.k + 1
        self._checkpoints.publish_state(self.version, self._policy, self._optimiser)
        self._checkpoints.publish_weights(self.version, self._policy, self._side_files)
        self._checkpoints.retire(self.version)
