"""Plays a whole run on virtual time: the orchestrator that ships, joined to a simulated world.

`simulate(WorldSettings(...), RolloutSection(...), RunSection(...))` is all that is needed. The same settings give the same history, event
for event; `interleaving` plays another order of what happens at one instant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from headway.errors import first_cause
from headway.events import AnyEvent
from headway.flow.train_sink import Advantages, KeepGroup
from headway.orchestrator import NO_DEBUG, Orchestrator, Parts
from headway.rules.advantages import grpo
from headway.rules.view import LedgerView
from headway.settings import DebugSection, EnvironmentSection, EvalSection, MetricsSection, RolloutSection, RunSection
from headway.sim.engine import EngineSettings, SimEngine
from headway.sim.journal import SimJournal
from headway.sim.loop import run as run_on_virtual_time
from headway.sim.prompts import ListPrompts, RecordingExporter
from headway.sim.store import KeptBatch, SimBatchStore
from headway.sim.trainer import SimTrainer, TrainerSettings
from headway.sim.worker import RolloutSettings, SimWorker
from headway.types import Checkpoint, Prompt

LINEAGE = "sim"
_METRICS = MetricsSection(interval_seconds=10.0)


@dataclass(frozen=True, kw_only=True)
class WorldSettings:
    """The world around a run. `epochs` 0: prompts without end. `prompts_fail_after`: the source fails after so many prompts.

    `advantages`, `keep`: what a user names as rollout.advantage and rollout.filter.
    """

    seed: int = 0
    rollouts: RolloutSettings = field(default_factory=RolloutSettings)
    engines: Sequence[EngineSettings] = (EngineSettings(),)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    prompts: int = 1000
    epochs: int = 0
    prompts_fail_after: int | None = None
    eval_prompts: int = 0
    commit_seconds: float = 0.0
    advantages: Advantages = grpo
    keep: KeepGroup | None = None


@dataclass(frozen=True, kw_only=True)
class SimResult:
    """How a run went. `seconds` is virtual; `trainer_share` the part of them in which the trainer trained.

    `sampled_tokens`: what the engines have written in all, whatever became of it.
    """

    reason: str
    seconds: float
    events: Sequence[AnyEvent]
    batches: Mapping[int, KeptBatch]
    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    ledger: LedgerView
    attempts: int
    peak: int
    trainer_share: float
    sampled_tokens: int

    @property
    def max_staleness(self) -> int:
        """The largest staleness of a token that was trained on."""
        return max((batch.max_seen for batch in self.batches.values()), default=0)

    @property
    def masked_share(self) -> float:
        """The share of the tokens in batches that was masked as stale."""
        masked = sum(sum(batch.masked.values()) for batch in self.batches.values())
        trained = sum(sum(batch.tokens.values()) for batch in self.batches.values())
        return masked / max(1, masked + trained)


def simulate(
    world: WorldSettings,
    rollout: RolloutSection,
    run: RunSection,
    *,
    evaluation: EvalSection | None = None,
    metrics: MetricsSection = _METRICS,
    debug: DebugSection = NO_DEBUG,
    journal: SimJournal | None = None,
    drain_at: float = inf,
    interleaving: int | None = None,
    limit_seconds: float = 1e7,
) -> SimResult:
    """Play a run to its end and return how it went; raises what the run ends with, out of its exception groups.

    `journal`: where the history goes (kept by the caller when the run fails); `drain_at`: when somebody asks for the end;
    `limit_seconds`: when `NoEnd` is raised.
    """
    history = SimJournal(keep_rollouts=False, commit_seconds=world.commit_seconds) if journal is None else journal
    join = partial(Orchestrator, run=run, rollout=rollout, evaluation=evaluation, metrics=metrics, debug=debug)
    play = _play(world, join, run.seed, history, drain_at)
    try:
        return run_on_virtual_time(play, seed=interleaving, limit_seconds=limit_seconds)
    except BaseExceptionGroup as group:
        raise first_cause(group) from group


async def _play(
    world: WorldSettings,
    join: partial[Orchestrator],
    seed: int,
    journal: SimJournal,
    drain_at: float,
) -> SimResult:
    loop = asyncio.get_running_loop()
    engines = [SimEngine(f"engine-{number}", settings) for number, settings in enumerate(world.engines)]
    worker = SimWorker(world.rollouts, engines, seed=world.seed)
    store = SimBatchStore()
    trainer = SimTrainer(world.trainer, store.batches, lineage=LINEAGE, seed=world.seed)
    recorded = RecordingExporter()

    async def ask_to_drain() -> None:
        await asyncio.sleep(drain_at)
        orchestrator.drain("asked to")

    parts = Parts(
        prompts=ListPrompts(world.prompts, epochs=world.epochs, seed=seed, fails_after=world.prompts_fail_after),
        worker=worker,
        engines=engines,
        trainer=trainer,
        store=store,
        journal=journal,
        exporters=[recorded],
        first=Checkpoint(0, f"{LINEAGE}-0", "sim://0"),
        advantages=world.advantages,
        keep=world.keep,
        eval_prompts=[Prompt(f"eval-{number}", 0, {"number": number}) for number in range(world.eval_prompts)],
        services=[ask_to_drain] if drain_at < inf else [],
        clock=loop.time,
    )
    environment = EnvironmentSection(entry="headway.sim:world", score="headway.sim:score" if world.rollouts.scored_apart else "")
    orchestrator = join(parts, environment=environment)
    reason = await orchestrator.run()
    return SimResult(
        reason=reason,
        seconds=loop.time(),
        events=journal.events,
        batches=store.batches,
        rows=recorded.rows,
        ledger=orchestrator.ledger,
        attempts=worker.attempts,
        peak=worker.peak,
        trainer_share=trainer.busy_seconds / max(loop.time(), 1e-9),
        sampled_tokens=sum(engine.sampled for engine in engines),
    )
