"""One run of the study: an arm, a place in the grid and a seed in, a row of figures out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from game import PROMPTS
from world import LINEAGE, StudyStore, StudyTrainer, StudyWorker, ToolDelay, Weights

from headway.errors import EmptyBatches, first_cause
from headway.events import AnyEvent
from headway.orchestrator import Orchestrator, Parts, Sections
from headway.rules.advantages import grpo
from headway.settings import DebugSection, EnvironmentSection, MetricsSection, RolloutSection, RunSection, TrainerSection
from headway.sim.distributions import Uniform
from headway.sim.engine import EngineSettings, SimEngine
from headway.sim.journal import SimJournal
from headway.sim.loop import run as run_on_virtual_time
from headway.sim.prompts import ListPrompts, RecordingExporter
from headway.sim.trainer import TrainerSettings
from headway.types import Checkpoint, OnStale

GROUPS, MEMBERS = 16, 8
TRAINER_SECONDS, SYNC_SECONDS = 1.0, 0.02
LEARNING_RATE = 5e-4


Loss = Literal["decoupled_ppo", "tis", "reinforce"]


@dataclass(frozen=True)
class Arm:
    """What is compared: the rule for stale tokens, and the loss. `synchronous`: max_staleness 0."""

    on_stale: OnStale
    loss: Loss
    synchronous: bool = False


ARMS: Mapping[str, Arm] = {
    "synchronous": Arm("mask", "decoupled_ppo", synchronous=True),
    "wait": Arm("wait", "decoupled_ppo"),
    "mask": Arm("mask", "decoupled_ppo"),
    "drop": Arm("drop", "decoupled_ppo"),
    "train+tis": Arm("train", "tis"),
    "train+decoupled_ppo": Arm("train", "decoupled_ppo"),
    "train+reinforce": Arm("train", "reinforce"),
}


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run's place in the study.

    `S`: max_staleness = steps_ahead; `share`: of prompts on which the tool is slow; `rate`: multiple of the learning rate. `lag`: exact
    lag in versions (the collapse study); None in the deciding study.
    """

    arm: str
    S: int
    share: float
    rate: float
    seed: int
    steps: int
    lag: int | None = None


@dataclass(frozen=True, kw_only=True, repr=False)  # asyncio writes the result of its main task out when it ends: that took seconds
class Played:
    """A run that was played: what rows are made of and tests look at. `sampled`, `asked`: the worker's counts; `seconds`: virtual.

    `ended`: why it ended early; empty for a run that had all its batches.
    """

    cell: Cell
    store: StudyStore
    weights: Weights
    measured: Sequence[Mapping[str, Any]]
    events: Sequence[AnyEvent]
    sampled: int
    asked: int
    seconds: float
    ended: str


def slow_seconds(max_staleness: int) -> float:
    """Return the slow tool's delay: long enough that max_staleness + 1 versions are made meanwhile, with half a version to spare."""
    return (max_staleness + 1.5) * (TRAINER_SECONDS + SYNC_SECONDS)


def play(cell: Cell) -> Played:
    """Play one run to its end, on virtual time."""
    return run_on_virtual_time(_play(cell), limit_seconds=1e6)


async def _play(cell: Cell) -> Played:
    loop = asyncio.get_running_loop()
    arm = ARMS[cell.arm]
    bound = 0 if arm.synchronous else cell.S
    engine = SimEngine("engine-0", EngineSettings(transfer_seconds=SYNC_SECONDS))
    weights = Weights()
    store = StudyStore()
    worker = StudyWorker(engine, weights, ToolDelay(seed=cell.seed, slow_share=cell.share, slow_seconds=slow_seconds(cell.S)))
    rollout = RolloutSection(
        groups_per_batch=GROUPS,
        group_size=MEMBERS,
        max_concurrent=4 * GROUPS * MEMBERS * (bound + 1),
        max_staleness=bound,
        steps_ahead=bound,
        on_stale=arm.on_stale,
        timeout_seconds=3600.0,
    )
    trainer = StudyTrainer(
        trainer_section(arm.loss, cell.rate),
        store,
        weights,
        rollout=rollout,
        seed=cell.seed,
        steps=cell.steps,
        seconds=TrainerSettings(seconds=Uniform(0.9 * TRAINER_SECONDS, 1.1 * TRAINER_SECONDS)),
    )
    journal = SimJournal(keep_rollouts=False)
    parts = Parts(
        prompts=ListPrompts(PROMPTS, seed=cell.seed),
        worker=worker,
        engines=[engine],
        trainer=trainer,
        store=store,
        journal=journal,
        exporters=[RecordingExporter()],
        first=Checkpoint(0, f"{LINEAGE}-0", "sim://0"),
        advantages=grpo,
        clock=loop.time,
    )
    orchestrator = Orchestrator(
        parts,
        Sections(
            run=RunSection(seed=cell.seed, steps=cell.steps, max_uncovered_batches=0),  # what the guard would end is what is studied
            rollout=rollout,
            environment=EnvironmentSection(entry="game:attempt"),
            evaluation=None,
            metrics=MetricsSection(interval_seconds=1e5),
            debug=DebugSection(publish_lag=cell.lag or 0),
        ),
    )
    ended = ""
    try:
        await orchestrator.run()
    except* EmptyBatches as group:  # a policy that always does the same, a perfect one too, leaves nothing to learn from
        ended = str(first_cause(group))
    return Played(
        cell=cell,
        store=store,
        weights=weights,
        measured=trainer.measured,
        events=journal.events,
        sampled=worker.sampled,
        asked=worker.asked,
        seconds=loop.time(),
        ended=ended,
    )


def trainer_section(loss: Loss, rate: float) -> TrainerSection:
    """Return the trainer's settings: two minibatches, so that a clip around the proximal policy has something to clip."""
    return TrainerSection(loss=loss, learning_rate=LEARNING_RATE * rate, warmup_steps=5, schedule="constant", minibatches=2)
