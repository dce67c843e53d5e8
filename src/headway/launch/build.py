"""From a config to ready parts: each adapter is imported only when the config names it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headway.config import run_path, state_path
from headway.entries import load_entry
from headway.errors import StorageError
from headway.flow.ingest import Ingest
from headway.flow.keeper import FreeSpace
from headway.flow.train_sink import KeepGroup
from headway.flow.user_functions import Advantages
from headway.formats.files import storage_errors
from headway.formats.offered import OfferedGroup, SampleLimits
from headway.formats.run_directory import RunDirectory, numbered
from headway.launch.exporters import MakeExporter, named_exporters
from headway.parts import MakeEngine
from headway.protocols import BatchStore, Engine, Journal, PromptSource, Trainer, Worker
from headway.rules.advantages import ADVANTAGES
from headway.secrecy import without_login
from headway.settings import Config, EvalSection, eval_source
from headway.types import Checkpoint, EngineAddress, Prompt, SamplingParams

Service = Callable[[], Coroutine[Any, Any, None]]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the user gives to a run, read and imported."""

    prompts: PromptSource
    eval_prompts: Sequence[Prompt]
    advantages: Advantages
    keep: KeepGroup | None
    exporters: Mapping[str, MakeExporter] = field(default_factory=dict)


def inputs_of(config: Config, base: Path) -> Inputs:
    """Open the prompts and import the functions that a config names. Raises HeadwayError; call outside of an event loop."""
    return Inputs(
        prompts=prompts_of(config, base),
        eval_prompts=asyncio.run(eval_prompts_of(config, config.eval, base)) if config.eval else (),
        advantages=advantages_of(config, base),
        keep=filter_of(config, base),
        exporters=named_exporters(config, base),
    )


def advantages_of(config: Config, base: Path) -> Advantages:
    """Return the advantage function that rollout.advantage names."""
    name = config.rollout.advantage
    built_in: Advantages | None = ADVANTAGES.get(name)
    function: Advantages = load_entry(name, base, key="rollout.advantage") if built_in is None else built_in
    return function


def filter_of(config: Config, base: Path) -> KeepGroup | None:
    """Return the group filter that rollout.filter names, or None."""
    name = config.rollout.filter
    if not name:
        return None
    function: KeepGroup = load_entry(name, base, key="rollout.filter")
    return function


def prompts_of(config: Config, base: Path) -> PromptSource:
    """Open the prompts to train on."""
    from headway.adapters.prompts import open_source

    return open_source(config.prompts, base, config.run.seed)


async def eval_prompts_of(config: Config, evaluation: EvalSection, base: Path) -> Sequence[Prompt]:
    """Read the prompts to evaluate on: one pass, in their own order, the first `limit`."""
    from headway.adapters.prompts import open_source

    prompts: list[Prompt] = []
    async for prompt in open_source(eval_source(evaluation, config.prompts), base, config.run.seed):
        prompts.append(prompt)
        if len(prompts) == evaluation.limit:
            break
    return prompts


def sample_limits(config: Config, first: Checkpoint) -> SampleLimits:
    """Return what a sample from outside may be: as long as live ones, with ids that the model has; version 0 must exist."""
    adapters = config.engine.weight_transfer == "lora" and config.model.path  # a version says nothing of the model then
    try:
        model = msgspec.json.decode((Path(adapters or first.directory) / "config.json").read_bytes(), type=_ModelSize)
    except (OSError, msgspec.MsgspecError):
        model = _ModelSize()
    return SampleLimits(tokens=config.rollout.max_rollout_tokens or model.max_position_embeddings, vocabulary=model.vocab_size)


class _ModelSize(msgspec.Struct, frozen=True):
    vocab_size: int = 0
    max_position_embeddings: int = 0


def replay_of(
    config: Config, base: Path, limits: SampleLimits, given: Mapping[str, int] | None = None
) -> AsyncIterable[OfferedGroup] | None:
    """Return the groups of replay.files, but those `given` before, or None. Raises ConfigError for files that are not there."""
    if config.replay is None:
        return None
    from headway.adapters.replay import ReplayFiles, find_files

    files = dict.fromkeys(path for pattern in config.replay.files for path in find_files(pattern, base))  # each once
    return ReplayFiles(list(files), epochs=config.replay.epochs, limits=limits, given=given)


def ingest_of(config: Config, run: RunDirectory, limits: SampleLimits) -> Callable[[Ingest], Service] | None:
    """Return what makes, of the orchestrator's Ingest, the service that listens for posted groups; None: nobody listens."""
    settings = config.ingest
    if settings is None:
        return None
    from headway.adapters.ingest.server import IngestServer

    return lambda ingest: IngestServer(settings, ingest=ingest, limits=limits, address_file=run.ingest_json, clock=time.time).run


def journal_of(config: Config, run_id: str, *, taken_up: RunDirectory | None = None) -> Journal:
    """Open the journal in the state directory. `taken_up`: a run that goes on, whose journal is not begun anew where it has batches."""
    from headway.adapters.journal.database import DATABASE
    from headway.adapters.journal.sqlite import SqliteJournal

    state = state_path(config)
    if taken_up is not None and numbered(taken_up.batches) and not (state / DATABASE).exists():
        raise StorageError(
            f"{state}: holds no journal, and {taken_up.path} has batches that were formed: set run.state_directory to where the journal "
            "of this run lies, or start another run"
        )
    return SqliteJournal(state, run_id=run_id)


def store_of(run: RunDirectory, lineage: str) -> BatchStore:
    """Return the store of batches in the run directory."""
    from headway.adapters.batch_store import DirectoryBatchStore

    return DirectoryBatchStore(run, lineage)


def free_space_of(config: Config, run: RunDirectory) -> FreeSpace:
    """Return what asks how much room is left where the run writes."""
    from headway.adapters.disks import Disks

    return Disks([run.path, state_path(config)]).free_space


def retirement_of(run: RunDirectory) -> Callable[[int], Awaitable[None]]:
    """Return what removes the directories of batches below one."""
    from headway.adapters.disks import BatchDirectories

    return BatchDirectories(run).retire


def engines_of(config: Config, launched: Sequence[EngineAddress]) -> list[Engine]:
    """Return the administrative clients of the launched engines, or of those that the config names where none is launched."""
    from headway.adapters.engines.addresses import read_address

    make, settings = make_engine_of(config), config.engine
    given = [read_address(text, settings.kind) for text in settings.urls] if settings.launch == "none" else launched
    return [make(f"engine-{index}", EngineAddress(without_login(address.url), address.kind)) for index, address in enumerate(given)]


def make_engine_of(config: Config) -> MakeEngine:
    """Return what makes the administrative client of an engine by its name and address."""
    from headway.adapters.engines import admin_of

    rollout = config.rollout
    sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k)
    return lambda name, address: admin_of(name, address, config.engine, sampling=sampling, model=config.model.path)


def roster_of(config: Config) -> AsyncIterable[Sequence[EngineAddress]] | None:
    """Return who tells of the engines in engine.urls_file as they come and go; None: there is no such file."""
    if not config.engine.urls_file:
        return None
    from headway.adapters.engines.roster import UrlsFile

    return UrlsFile(Path(config.engine.urls_file), config.engine.kind)


def trainer_of(
    config: Config, run: RunDirectory, lineage: str, alive: Callable[[], str | None], software: Callable[[str], None] = lambda _: None
) -> Trainer:
    """Return the trainer behind the run directory, child or not; `alive` says why it will bring no more versions.

    `software` hears which software has written each version that is found.
    """
    from headway.adapters.trainers.directory import DirectoryTrainer

    each_version = config.debug.publish_lag > 0
    return DirectoryTrainer(run, lineage, config.trainer.poll_seconds, alive, software=software, each_version=each_version)


async def worker_of(config: Config, run: RunDirectory, lineage: str, first: Checkpoint, base: Path) -> Worker:
    """Start the rollout workers, or the inline one."""
    environment = config.environment
    model = _kept_tokenizer(config, first)
    if environment.workers == 0:
        from headway.worker.inline import InlineWorker

        return InlineWorker.open(environment, base=base, model=model, lineage=lineage)
    from headway.adapters.workers.processes import ProcessWorkers

    return await ProcessWorkers.start(environment, base=base, model=model, lineage=lineage, logs=run.logs)


def worker_restarts(worker: Worker) -> dict[str, int]:
    """Return how often worker processes were started again, for the pipeline's rows."""
    return {"worker_restarts": getattr(worker, "restarts", 0)}


def _kept_tokenizer(config: Config, first: Checkpoint) -> Path:
    """Return a directory with the model's tokenizer that stays: a worker may be started again when version 0 has long been retired."""
    if config.model.path:
        return Path(config.model.path)
    kept = state_path(config) / "tokenizer"
    with storage_errors(f"{kept}: the tokenizer cannot be kept there"):
        kept.mkdir(parents=True, exist_ok=True)
        for name in _TOKENIZER_FILES:
            if (file := Path(first.directory) / name).exists():
                shutil.copy(file, kept / name)
    return kept


def first_checkpoint(config: Config, run: RunDirectory, lineage: str) -> Checkpoint:
    """Return where version 0 lies: the checkpoint of model.path, or what the trainer makes by model.init."""
    directory = config.model.path or str(run.weight(0))
    return Checkpoint(0, f"{lineage}-0", directory)


def new_run_directory(config: Config) -> RunDirectory:
    """Make the run directory, refusing a used one. Its path is absolute: engines elsewhere are told where weights lie."""
    return RunDirectory.create(run_path(config).absolute())


def used_run_directory(config: Config) -> RunDirectory | None:
    """Take up the run directory of a run that was started before; None: there is none."""
    return RunDirectory.take_up(run_path(config).absolute())
