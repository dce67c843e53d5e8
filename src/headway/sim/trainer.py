"""A simulated trainer: it takes batches in order, each for a drawn time, and publishes a version for each.

It is the second half of the double lock: a batch whose oldest contributing token breaks the bound ends it with `BoundBreached`. It has no
task of its own: when a batch will be done is known when it is announced. It may outlive the orchestrator (`sim.world`): then it finds
the batches that were written for it by itself, and one that is announced to it again must be the same.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from headway.errors import BoundBreached, TrainerFailed
from headway.sim.chance import Draws
from headway.sim.distributions import ONE_SECOND, Distribution, Lognormal
from headway.sim.store import KeptBatch
from headway.types import Checkpoint


class TrainerFault(NamedTuple):
    """At this time it stands still for so long; or, if it `dies`, it is away for so long, and begins its batch again."""

    at: float
    seconds: float
    dies: bool = False


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """How a trainer behaves: seconds per batch, extra seconds by batch (infinite: it hangs there), the batch that it dies of.

    `tokens_per_second`: a batch takes its tokens' time on top (0: none); `jitter`: standard deviation of the logarithm of a factor
    with mean 1, of both times. `faults`: what happens to it at given times, in order.
    """

    seconds: Distribution = ONE_SECOND
    tokens_per_second: float = 0.0
    jitter: float = 0.0
    faults: tuple[TrainerFault, ...] = ()
    late: Mapping[int, float] = field(default_factory=dict)
    dies_at: int | None = None


class SimTrainer:
    """`protocols.Trainer` in memory. `kept`: the batches, as `SimBatchStore` keeps them; `version`: the weights that it starts from."""

    def __init__(self, settings: TrainerSettings, kept: Mapping[int, KeptBatch], *, lineage: str, seed: int = 0, version: int = 0) -> None:
        self._settings = settings
        self._kept = kept
        self._lineage = lineage
        self._seed = seed
        self._first = version
        self._done: list[float] = []  # _done[i]: when batch `version + i` is trained
        self._seconds: list[float] = []
        self._taken: dict[int, KeptBatch] = {}  # those that `kept` has
        self._submitted = asyncio.Event()
        self.log: list[tuple[float, float, str, str]] = []  # from, until, state, why: but for when it waits for a batch

    async def submit(self, k: int) -> None:
        """Take batch k up; it must be the next, or be known already, and must have been written and keep the bound."""
        if self._first <= k < self._first + len(self._done):
            if self._kept.get(k) is not self._taken.get(k):
                raise TrainerFailed(f"batch {k} was announced again, and is another one now")
            return
        self._take(k)

    def find(self) -> None:
        """Take up what was written in its lineage and not announced, as who polls a directory does."""
        while (batch := self._kept.get(k := self._first + len(self._done))) is not None and batch.lineage == self._lineage:
            self._take(k)

    def completed(self) -> Mapping[int, tuple[float, KeptBatch]]:
        """Return the batches that are trained by now, as far as they are still kept, and when they were."""
        now = asyncio.get_running_loop().time()
        return {k: (done, batch) for k, batch in self._taken.items() if (done := self._done[k - self._first]) <= now}

    def _take(self, k: int) -> None:
        self._check(k)
        now = asyncio.get_running_loop().time()
        seconds = self._seconds_of(k)
        self._done.append(self._train(max(now, self._done[-1] if self._done else 0.0), seconds + self._settings.late.get(k, 0.0)))
        self._seconds.append(seconds)
        self._taken[k] = self._kept[k]
        while (oldest := next(iter(self._taken))) not in self._kept:
            del self._taken[oldest]
        self._submitted.set()

    def _seconds_of(self, k: int) -> float:
        settings, draws = self._settings, Draws(self._seed, "trainer", k)
        seconds = settings.seconds.sample(draws)
        if settings.tokens_per_second:
            seconds += self._kept[k].positions / settings.tokens_per_second
        return seconds * Lognormal(1.0, settings.jitter).sample(draws) if settings.jitter else seconds

    def _train(self, start: float, seconds: float) -> float:
        """Return when a batch is trained that is begun at `start`, and note what happens until then."""
        left = seconds
        for at, away, dies in self._settings.faults:
            if at >= start + left:
                break
            if at + away <= start:
                continue
            if at > start:
                self.log.append((start, at, "training", ""))
                left = seconds if dies else left - (at - start)
            self.log.append((max(at, start), at + away, "waiting", "lost" if dies else "stalled"))
            start = at + away
        self.log.append((start, start + left, "training", ""))
        return start + left

    async def checkpoint(self, after: int) -> Checkpoint:
        """Wait for the newest version above `after`; raises TrainerFailed when the trainer dies before."""
        loop = asyncio.get_running_loop()
        index = max(0, after - self._first)
        while len(self._done) <= index:
            self._submitted.clear()
            await self._submitted.wait()
        if self._done[index] == inf:
            await loop.create_future()
        await asyncio.sleep(self._done[index] - loop.time())
        if self._settings.dies_at is not None and self._settings.dies_at <= self._first + index:
            raise TrainerFailed(f"the trainer died of batch {self._settings.dies_at}, as the simulation's settings say")
        trained = max(index + 1, bisect_right(self._done, loop.time()))  # the sleep may end a rounding short
        if self._settings.dies_at is not None:
            trained = min(trained, self._settings.dies_at - self._first)
        version = self._first + trained
        return Checkpoint(version, f"{self._lineage}-{version}", f"sim://{version}")

    async def metrics(self, k: int) -> Mapping[str, Any]:
        """Return how long batch k took."""
        return {"step_seconds": self._seconds[k - self._first]} if k >= self._first else {}

    @property
    def busy_seconds(self) -> float:
        """Seconds spent training, in all."""
        return sum(self._seconds)

    def _check(self, k: int) -> None:
        expected = self._first + len(self._done)
        if k != expected:
            raise TrainerFailed(f"batch {k} was announced where batch {expected} comes next")
        if k not in self._kept:
            raise TrainerFailed(f"batch {k} was announced before it was written")
        batch = self._kept[k]
        if batch.lineage and batch.lineage != self._lineage:
            raise TrainerFailed(f"batch {k} is of lineage {batch.lineage}, and the trainer's is {self._lineage}")
        if batch.on_stale != "train" and batch.oldest_contributing is not None and batch.oldest_contributing < k - batch.max_staleness:
            raise BoundBreached(
                f"batch {k} holds a contributing token of version {batch.oldest_contributing}: max_staleness is {batch.max_staleness}"
            )
