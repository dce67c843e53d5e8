"""The world around the orchestrator: real tokens and real learning, on the simulation's clock.

The worker samples each token from the tables of the version that the simulated engine serves at that instant, stamps it with that version
and its log-probability, and encodes a real payload. The store assembles batches with headway's own code, in memory. The trainer takes
virtual time as `SimTrainer` does, and does headway's own trainer step at the moment a batch is announced; the version it makes is seen
when the virtual time is over. Both halves of the double lock hold as in every run: `keep`, `assemble`, `SimTrainer` and `admit` each
assert the bound.
"""

from __future__ import annotations

import asyncio
import dataclasses
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from game import TURNS, Kind, Tables, conversation, dealt, is_long, reward
from policy import new_policy, tables

from headway.embedded.trainer.guard import admit
from headway.embedded.trainer.step import learning_rate, make_optimiser, train
from headway.formats.batch import AssembledBatch, BatchFacts, TrainerBatch, assemble
from headway.formats.rollout import encode_samples
from headway.protocols import Mover
from headway.settings import RolloutSection, TrainerSection
from headway.sim.chance import Draws
from headway.sim.engine import SimEngine
from headway.sim.generation import Writing
from headway.sim.store import SimBatchStore
from headway.sim.trainer import SimTrainer, TrainerSettings
from headway.types import AttemptRequest, Batch, Checkpoint, Failure, Prompt, Rollout, Sample, Score, ScoreRequest

LINEAGE = "study"
TURN_SECONDS = 0.05
QUICK_TOOL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class ToolDelay:
    """How long the tool takes: `slow_seconds` for a `slow_share` of prompts (each of them slow for all its members), a moment otherwise."""

    seed: int
    slow_share: float
    slow_seconds: float

    def slow(self, prompt: Prompt) -> bool:
        """Whether the tool is slow on this prompt, in this epoch."""
        return Draws(self.seed, "tool", prompt.id, prompt.epoch).random() < self.slow_share

    def seconds(self, prompt: Prompt) -> float:
        """Return how long the tool takes on this prompt, in this epoch."""
        return self.slow_seconds if self.slow(prompt) else QUICK_TOOL_SECONDS


@dataclass(repr=False)
class Weights:
    """What each version plays."""

    by_version: dict[int, Tables] = field(default_factory=dict)
    _choices: dict[tuple[int, Kind, int, tuple[int, ...]], tuple[list[float], list[float]]] = field(default_factory=dict)

    def sample(self, version: int, kind: Kind, hidden: int, tokens: tuple[int, ...], drawn: float) -> tuple[int, float]:
        """Return the next token by a uniform number, and its log-probability, as `version` plays after `tokens`."""
        key = (version, kind, hidden if is_long(kind, tokens) else -1, tokens)  # blind play knows no hidden digit
        known = self._choices.get(key)
        if known is None:
            after = self.by_version[version].after(kind, hidden, tokens)
            known = self._choices[key] = (np.exp(after).cumsum().tolist(), after.tolist())
        cumulative, logprobs = known
        token = min(bisect_right(cumulative, drawn), len(cumulative) - 1)
        return token, logprobs[token]


class StudyWorker:
    """`protocols.Worker`: plays the game. `sampled`: tokens written in all, by attempts that were cancelled too; `asked`: tools asked."""

    def __init__(self, engine: SimEngine, weights: Weights, delay: ToolDelay) -> None:
        self._engine = engine
        self._weights = weights
        self._delay = delay
        self.sampled = self.asked = 0

    async def attempt(self, request: AttemptRequest, move: Mover | None = None) -> Rollout | Failure:
        """Play one game."""
        draws = Draws(request.seed)
        kind, hidden = dealt(request.prompt.fields["number"])
        started = asyncio.get_running_loop().time()
        tokens: tuple[int, ...] = ()
        versions, logprobs = [], []
        for turn in range(TURNS):
            if self._engine.paused:
                await self._engine.generation.write(Writing(tokens=0, seconds=0.0, until=0.0))  # over when generation goes on
            version = self._engine.version
            token, logprob = self._weights.sample(version, kind, hidden, tokens, draws.random())
            self.sampled += 1
            tokens += (token,)
            versions.append(version)
            logprobs.append(logprob)
            await asyncio.sleep(TURN_SECONDS)
            if turn == 0 and is_long(kind, tokens):
                self.asked += 1
                await asyncio.sleep(self._delay.seconds(request.prompt))
        return self._rollout(request, kind, hidden, tokens, versions, logprobs, started)

    def _rollout(
        self,
        request: AttemptRequest,
        kind: Kind,
        hidden: int,
        tokens: tuple[int, ...],
        versions: list[int],
        logprobs: list[float],
        started: float,
    ) -> Rollout:
        ids, sampled = conversation(kind, hidden, tokens)
        mask = np.array(sampled)
        behaviour = np.zeros(len(ids), np.float32)
        behaviour[mask] = logprobs
        starts = [turn for turn, version in enumerate(versions) if turn == 0 or version != versions[turn - 1]]
        spans = [(turn, versions[turn]) for turn in starts]
        long = is_long(kind, tokens)
        sample = Sample(
            token_ids=np.array(ids, np.int32),
            sampled_mask=mask,
            loss_mask=mask,
            logprobs=behaviour,
            span_start=np.array(starts, np.int32),
            span_version=np.array([version for _, version in spans], np.int32),
        )
        return Rollout(
            group=request.group,
            member=request.member,
            attempt=request.attempt,
            prompt_id=request.prompt.id,
            environment=kind,
            reward=reward(kind, hidden, tokens),
            rewards={},
            finish="stop",
            turns=TURNS,
            started=started,
            finished=asyncio.get_running_loop().time(),
            engine=self._engine.name,
            metadata={"spans": spans, "long": long, "slow": long and self._delay.slow(request.prompt)},
            samples=1,
            tokens=len(ids),
            sampled_tokens=TURNS,
            head=min(versions),
            tail=max(versions),
            payload=encode_samples([sample]),
        )

    async def score(self, request: ScoreRequest) -> Sequence[Score] | Failure:
        """Nothing is scored apart in this study."""
        raise AssertionError(f"group {request.group} carries its rewards")

    async def close(self) -> None:
        """Hold nothing that could be closed."""


class StudyStore:
    """`protocols.BatchStore`: headway's own assembly, in memory. `counts` holds, per batch, what the report needs."""

    def __init__(self) -> None:
        self.kept = SimBatchStore()
        self.assembled: dict[int, TrainerBatch] = {}
        self.rows: list[Mapping[str, Any]] = []
        self.counts: list[Counter[str]] = []

    async def write(self, batch: Batch) -> Mapping[str, Any]:
        """Assemble and keep the batch; raises BoundBreached."""
        await self.kept.write(batch)
        assembled = assemble(batch)
        self.assembled[batch.k] = _as_read(assembled)
        self.counts.append(_count(batch))
        self.rows.append(assembled.metrics)
        return assembled.metrics


def _count(batch: Batch) -> Counter[str]:
    """Count rollouts by kind: all, those whose first token is over max_staleness, those whose first token is credited all the same."""
    counts: Counter[str] = Counter()
    for rollout in (rollout for group in batch.groups for rollout in group.rollouts):
        over = batch.k - rollout.metadata["spans"][0][1] > batch.max_staleness
        credited = batch.on_stale != "mask" or not over
        kinds = [rollout.environment, *(["long"] if rollout.metadata["long"] else [])]
        for kind in kinds:
            counts.update({kind: 1, kind + " over": over, kind + " credited": credited})
        counts["slow"] += rollout.metadata["slow"]
    return counts


def _as_read(assembled: AssembledBatch) -> TrainerBatch:
    """Return the batch as `formats.batch.read_batch` would, had it been on a disk."""
    names = {one.name for one in dataclasses.fields(TrainerBatch)}
    facts: dict[str, Any] = {name: getattr(assembled.facts, name) for name in names & set(BatchFacts.__struct_fields__)}
    return TrainerBatch(k=assembled.facts.batch, lineage=LINEAGE, **facts, **dict[str, Any](assembled.arrays))


class StudyTrainer:
    """`protocols.Trainer`: `SimTrainer`'s time and lock, headway's own learning. `measured`: what each step measured."""

    def __init__(
        self,
        settings: TrainerSection,
        store: StudyStore,
        weights: Weights,
        *,
        rollout: RolloutSection,
        seed: int,
        steps: int,
        seconds: TrainerSettings,
    ) -> None:
        self._settings = settings
        self._rollout = rollout
        self._store = store
        self._weights = weights
        self._steps = steps
        self._clock = SimTrainer(seconds, store.kept.batches, lineage=LINEAGE, seed=seed)
        self._policy = new_policy(seed)
        self._optimiser = make_optimiser(self._policy, settings)
        self.measured: list[Mapping[str, Any]] = []
        weights.by_version[0] = tables(self._policy)

    async def submit(self, k: int) -> None:
        """Learn from batch k now; its version appears when the virtual time of the step is over."""
        await self._clock.submit(k)
        batch = admit(self._store.assembled.pop(k), version=k, vocabulary=self._policy.vocabulary, rollout=self._rollout)
        rate = learning_rate(self._settings, k, self._steps)
        self.measured.append(train(self._policy, self._optimiser, batch, self._settings, rate=rate))
        self._weights.by_version[k + 1] = tables(self._policy)

    async def checkpoint(self, after: int) -> Checkpoint:
        """Wait for the newest version above `after`."""
        return await self._clock.checkpoint(after)

    async def metrics(self, k: int) -> Mapping[str, Any]:
        """Return what the step on batch k measured."""
        return self.measured[k]
