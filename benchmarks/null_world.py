"""The world around `dispatch.py`: a worker, a trainer, a batch store and a journal that cost next to nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.events import AnyEvent
from headway.protocols import Entry, Mover
from headway.sim.journal import SimJournal
from headway.types import AttemptRequest, Batch, Checkpoint, Rollout, Score, ScoreRequest


class ForgetfulJournal(SimJournal):
    """The journal in memory, without its memory: what is measured is the path, not a growing heap."""

    async def append(self, entries: Sequence[Entry]) -> Sequence[AnyEvent]:
        return [entry.event for entry in entries]


@dataclass
class NullWorker:
    """Attempts that take `seconds()` and return a ready-made rollout; counts the integral of rollouts in flight over time."""

    seconds: Callable[[], float]
    payload: bytes = b"\0" * 64
    fresh: bool = False  # a payload of its own for each rollout
    gate: asyncio.Event | None = None  # attempts wait for it
    in_flight: int = 0
    area: float = 0.0
    since: float = 0.0
    finished: dict[int, float] = field(default_factory=dict)  # when the last member of a group ended

    def moved(self, by: int) -> None:
        now = time.perf_counter()
        self.area += self.in_flight * (now - self.since)
        self.since = now
        self.in_flight += by

    async def attempt(self, request: AttemptRequest, move: Mover | None = None) -> Rollout:
        self.moved(1)
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(self.seconds())
        payload = bytes(bytearray(self.payload)) if self.fresh else self.payload
        rollout = Rollout(
            group=request.group,
            member=request.member,
            attempt=request.attempt,
            prompt_id=request.prompt.id,
            environment="null",
            reward=float(request.group),  # how the sink's clock knows whose rewards it sees
            rewards={},
            finish="stop",
            turns=1,
            started=0.0,
            finished=0.0,
            engine=request.engine,
            metadata={},
            samples=1,
            tokens=64,
            sampled_tokens=32,
            head=0,
            tail=0,
            payload=payload,
        )
        self.moved(-1)
        self.finished[request.group] = time.perf_counter()
        return rollout

    async def score(self, request: ScoreRequest) -> Sequence[Score]:
        raise NotImplementedError(request)

    async def close(self) -> None: ...


class NullTrainer:
    """Trains in no time."""

    def __init__(self) -> None:
        self.trained = 0
        self.more = asyncio.Event()

    async def submit(self, k: int) -> None:
        self.trained = k + 1
        self.more.set()

    async def checkpoint(self, after: int) -> Checkpoint:
        while self.trained <= after:
            self.more.clear()
            await self.more.wait()
        return Checkpoint(self.trained, f"null-{self.trained}", "")

    async def metrics(self, k: int) -> dict[str, float]:
        return {}


class NullStore:
    """Writes nothing; its row has what the orchestrator itself reads of one."""

    async def write(self, batch: Batch) -> dict[str, Any]:
        rollouts = sum(len(group.rollouts) for group in batch.groups)
        covered = {"rollouts_by_environment": {"null": rollouts}, "head_coverage_by_environment": {"null": 1.0}}
        return {"batch": batch.k, **covered, "head_coverage_by_length": {"null": [1.0] * 10}, "token_fates": {"masked": 0}}
