"""What a run is made of: the parts that its orchestrator joins, and the sections of its config, by whoever starts it (`launch`, `sim`)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from headway.flow.engine_pool import EnginePool
from headway.flow.ingest import Ingest
from headway.flow.keeper import FreeSpace
from headway.flow.take_up import Resumption
from headway.flow.train_sink import KeepGroup
from headway.flow.user_functions import Advantages
from headway.formats.offered import OfferedGroup
from headway.protocols import BatchStore, Engine, Exporter, Journal, PromptSource, Trainer, Worker
from headway.settings import (
    Config,
    DebugSection,
    EngineSection,
    EnvironmentSection,
    EvalSection,
    MetricsSection,
    RolloutSection,
    RunSection,
    TrainerSection,
)
from headway.types import Checkpoint, EngineAddress, Prompt

Service = Callable[[], Awaitable[None]]
MakeEngine = Callable[[str, EngineAddress], Engine]


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The sections of a config that components go by."""

    run: RunSection
    rollout: RolloutSection
    environment: EnvironmentSection
    metrics: MetricsSection
    evaluation: EvalSection | None = None
    engine: EngineSection = field(default_factory=EngineSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    debug: DebugSection = field(default_factory=DebugSection)

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return those of a config."""
        return cls(
            run=config.run,
            rollout=config.rollout,
            environment=config.environment,
            metrics=config.metrics,
            evaluation=config.eval,
            engine=config.engine,
            trainer=config.trainer,
            debug=config.debug,
        )


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything the orchestrator joins, ready to use.

    `engines`: those that the config names or launches; all of them must serve before the run starts. `roster` tells which others there are,
    all of them each time that this has changed (at once for the first time, none if there is none), and `make_engine` makes the client of
    one, by its name in the run (`engine-<n>`, n from len(engines) on) and its address. The run closes the client of an engine that has
    left; the others are for who made them to close.

    `resumed`: with what a run that is taken up again begins. `replayed` groups and those that `listen` takes in come from elsewhere.
    `services` run beside the path, and those of `supervise`, which are told of the engines; one that raises ends the run. `restarts`: how
    often what was started again, for the pipeline's rows (`engine_restarts`, ...). `failing` hears of an error in the moment in which it
    begins to end the run; `loop_lag` says how late the event loop has turned since the last call (99th percentile and maximum, seconds).
    `free_space` and `retire_batches`: see `flow.keeper`. `served` is called once engines serve
    `first`: every one of `engines`, or the first that the roster brings.
    """

    prompts: PromptSource
    worker: Worker
    engines: Sequence[Engine]
    trainer: Trainer
    store: BatchStore
    journal: Journal
    exporters: Sequence[Exporter]
    first: Checkpoint
    advantages: Advantages
    roster: AsyncIterable[Sequence[EngineAddress]] | None = None
    make_engine: MakeEngine | None = None  # wanted where there is a roster
    resumed: Resumption | None = None
    keep: KeepGroup | None = None
    eval_prompts: Sequence[Prompt] = ()
    replayed: AsyncIterable[OfferedGroup] | None = None
    listen: Callable[[Ingest], Service] | None = None
    services: Sequence[Service] = ()
    supervise: Sequence[Callable[[EnginePool], Service]] = ()
    restarts: Callable[[], Mapping[str, int]] = dict
    failing: Callable[[BaseException], None] = lambda _: None
    loop_lag: Callable[[], tuple[float, float]] | None = None
    free_space: FreeSpace | None = None
    retire_batches: Callable[[int], Awaitable[None]] | None = None
    served: Callable[[], None] = lambda: None
    clock: Callable[[], float] = field(default=time.time)
