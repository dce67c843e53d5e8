"""The weight watcher brings every new version to every engine, and publishes it when all of them serve it.

Two tasks: one hears of complete checkpoints and acknowledges the batches behind them at once (so that the next batch may be formed while
engines still load); the other syncs the newest one (`prepare`, `transfer`, `commit`), skipping versions that were overtaken. A sync waits
for a running evaluation up to its hold. However a sync ends, no engine stays paused.

`publish_lag` (for studies): the version that is served is that many before the newest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from headway.errors import TrainerFailed
from headway.events import AnyEvent, BatchAcknowledged, EngineState, Published
from headway.flow.watch import Watch
from headway.protocols import Engine, Trainer
from headway.rules.lineage import served_version
from headway.rules.scheduling import sync_must_wait
from headway.settings import EvalSection
from headway.types import Checkpoint


class WeightWatcher:
    """Follows the trainer's checkpoints; the served version is the minimum over the engines."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        engines: Sequence[Engine],
        watch: Watch,
        record: Callable[[AnyEvent], None],
        evaluation: EvalSection | None,
        steps: int,
        clock: Callable[[], float],
        publish_lag: int = 0,
    ) -> None:
        self._trainer = trainer
        self._engines = engines
        self._watch = watch
        self._record = record
        self._evaluation = evaluation
        self._steps = steps
        self._clock = clock
        self._publish_lag = publish_lag
        self._seen: deque[Checkpoint] = deque()  # oldest first: what may be served, and what is newer
        self._newest: tuple[Checkpoint, float] | None = None
        self._serving: dict[str, int] = {}  # version by engine
        self._arrived = asyncio.Event()
        self.syncing = False
        self.poll_to_serve_seconds = 0.0  # of the latest publication
        self.sync_seconds = 0.0  # in all

    async def start(self, checkpoint: Checkpoint) -> None:
        """Make every engine serve the version that the run starts from, and publish it."""
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(self._ensure(engine, checkpoint), name=f"weights: {engine.name}")
        self._seen.append(checkpoint)
        self._publish(0.0)

    async def run(self) -> None:
        """Follow the trainer until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="weight watcher: follow")
            tasks.create_task(self._serve(), name="weight watcher: serve")

    async def _follow(self) -> None:
        ledger = self._watch.now
        while ledger.trained < self._steps:  # afterwards no checkpoint will come, and the trainer may end
            checkpoint = await self._trainer.checkpoint(ledger.trained)
            if checkpoint.version > ledger.next_batch:
                raise TrainerFailed(
                    f"checkpoint {checkpoint.label} claims {checkpoint.version} trained batches, and only {ledger.next_batch} were formed: "
                    "does another trainer write into this run's directory?"
                )
            for k in range(ledger.trained, checkpoint.version):
                self._record(BatchAcknowledged(self._clock(), k))
            self._seen.append(checkpoint)
            if (due := self._due()).version > ledger.version:
                self._newest = (due, asyncio.get_running_loop().time())
                self._arrived.set()

    def _due(self) -> Checkpoint:
        """Return the newest checkpoint that lies `publish_lag` versions behind, or the first there is."""
        latest = self._seen[-1].version - self._publish_lag
        while len(self._seen) > 1 and self._seen[1].version <= latest:
            self._seen.popleft()
        return self._seen[0]

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            if self._evaluation is not None and sync_must_wait(self._watch.now, self._evaluation):
                await self._hold(self._evaluation)
            self._arrived.clear()
            if self._newest is None:
                continue
            checkpoint, seen = self._newest
            started = loop.time()
            self.syncing = True
            try:
                async with asyncio.TaskGroup() as tasks:
                    syncs = [tasks.create_task(self._sync(engine, checkpoint), name=f"weights: {engine.name}") for engine in self._engines]
            finally:
                self.syncing = False
            self._publish(sum(sync.result() for sync in syncs))
            self.sync_seconds += loop.time() - started
            self.poll_to_serve_seconds = loop.time() - seen

    async def _hold(self, evaluation: EvalSection) -> None:
        try:
            async with asyncio.timeout(evaluation.hold_seconds):
                await self._watch.until(lambda now: not sync_must_wait(now, evaluation))
        except TimeoutError:
            return  # the evaluation is flagged mixed by who runs it: the version changes under it

    async def _ensure(self, engine: Engine, checkpoint: Checkpoint) -> None:
        if await engine.label() != checkpoint.label:
            await self._sync(engine, checkpoint)
        else:
            self._serves(engine, checkpoint)

    async def _sync(self, engine: Engine, checkpoint: Checkpoint) -> float:
        """Bring one engine to a version, and return the seconds that it took."""
        started = asyncio.get_running_loop().time()
        try:
            await engine.prepare(checkpoint)
            await engine.transfer(checkpoint)
            await engine.commit(checkpoint)
        except BaseException:
            await asyncio.shield(engine.abandon())
            raise
        self._serves(engine, checkpoint)
        return asyncio.get_running_loop().time() - started

    def _serves(self, engine: Engine, checkpoint: Checkpoint) -> None:
        self._serving[engine.name] = checkpoint.version
        self._record(EngineState(self._clock(), engine.name, "serving", checkpoint.label))

    def _publish(self, sync_engine_seconds: float) -> None:
        names = tuple(engine.name for engine in self._engines)
        self._record(Published(self._clock(), served_version(self._serving.values()), names, sync_engine_seconds))
