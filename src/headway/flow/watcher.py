"""The weight watcher brings every new version to every engine that serves, and publishes it when all of them serve it.

Two tasks: one hears of complete checkpoints and acknowledges the batches behind them at once (so that the next batch may be formed while
engines still load); the other syncs the newest one (`prepare`, `transfer`, `commit`), skipping versions that were overtaken. A sync waits
for a running evaluation up to its hold. However a sync ends, no engine stays paused: one whose sync fails is lost, and the others are
published without it. `take_up` gives a lost engine what is served now, and counts on it from then on.

`publish_lag` (for studies): the version that is served is that many before the newest.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext

from headway.errors import EngineFailed, EngineUnreachable, TrainerFailed
from headway.events import AnyEvent, BatchAcknowledged, Published
from headway.flow.engine_pool import EnginePool
from headway.flow.watch import Watch
from headway.protocols import Engine, Trainer
from headway.rules.scheduling import sync_must_wait
from headway.settings import EvalSection
from headway.types import Checkpoint

_log = logging.getLogger("headway")
_KNOCK_SECONDS = 1.0  # between two tries to reach an engine that is not up yet
_PATIENT_SYNCS = 3  # failed syncs of a lost engine in a row that may take their time; later ones do not hold up the end of the run


class WeightWatcher:
    """Follows the trainer's checkpoints; the served version is the minimum over the engines that serve."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        pool: EnginePool,
        watch: Watch,
        record: Callable[[AnyEvent], None],
        evaluation: EvalSection | None,
        steps: int,
        clock: Callable[[], float],
        publish_lag: int = 0,
        start_timeout_seconds: float = 0.0,
    ) -> None:
        self._trainer = trainer
        self._pool = pool
        self._watch = watch
        self._record = record
        self._evaluation = evaluation
        self._steps = steps
        self._clock = clock
        self._publish_lag = publish_lag
        self._start_timeout_seconds = start_timeout_seconds
        self._seen: deque[Checkpoint] = deque()  # oldest first: what may be served, and what is newer
        self._newest: tuple[Checkpoint, float] | None = None
        self._target: Checkpoint | None = None  # what engines serve or are being given
        self._one_sync = {engine.name: asyncio.Lock() for engine in pool.engines}
        self._failed_syncs = dict.fromkeys(self._one_sync, 0)  # of lost engines, in a row
        self._unpublished_seconds = 0.0  # what syncs took that led to no publication
        self._arrived = asyncio.Event()
        self.syncing = False
        self.poll_to_serve_seconds = 0.0  # of the latest publication
        self.sync_seconds = 0.0  # in all

    async def start(self, checkpoint: Checkpoint) -> None:
        """Make every engine serve the version that the run starts from, and publish it.

        An engine that cannot be reached may not be up yet: it has `start_timeout_seconds`. Raises EngineFailed, StorageError.
        """
        self._target = checkpoint
        async with asyncio.TaskGroup() as tasks:
            for engine in self._pool.engines:
                tasks.create_task(self._bring_first(engine), name=f"weights: {engine.name}")
        self._seen.append(checkpoint)
        self._publish(first=True)

    async def take_up(self, engine: Engine) -> None:
        """Give a lost engine what is served, and count on it again. Raises EngineFailed, StorageError."""
        await self._bring(engine)
        self._publish()

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
            self._target, seen = self._newest
            started = loop.time()
            self.syncing = True
            try:
                async with asyncio.TaskGroup() as tasks:
                    for engine in self._pool.serving:
                        tasks.create_task(self._update(engine, self._target), name=f"weights: {engine.name}")
            finally:
                self.syncing = False
            self._publish()
            self.sync_seconds += loop.time() - started
            self.poll_to_serve_seconds = loop.time() - seen

    async def _hold(self, evaluation: EvalSection) -> None:
        try:
            async with asyncio.timeout(evaluation.hold_seconds):
                await self._watch.until(lambda now: not sync_must_wait(now, evaluation))
        except TimeoutError:
            return  # the evaluation is flagged mixed by who runs it: the version changes under it

    async def _update(self, engine: Engine, checkpoint: Checkpoint) -> None:
        """Bring a version to an engine that serves; when that fails, it is lost."""
        self._pool.syncs(engine.name)
        try:
            await self._sync(engine, checkpoint)
        except EngineFailed as error:
            self._pool.lost(engine.name, error)
        else:
            self._pool.serves(engine.name, checkpoint)

    async def _bring_first(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        give_up, warned = loop.time() + self._start_timeout_seconds, False
        while True:
            try:
                return await self._bring(engine)
            except EngineFailed as error:
                if self._pool.is_returning(engine.name):
                    await self._pool.returned(engine.name)
                elif not isinstance(error, EngineUnreachable) or loop.time() + _KNOCK_SECONDS > give_up:
                    raise
                elif not warned:
                    warned = True
                    _log.warning("%s. It may not be up yet: it has %g s (engine.start_timeout_seconds)", error, self._start_timeout_seconds)
            await asyncio.sleep(_KNOCK_SECONDS)

    async def _bring(self, engine: Engine) -> None:
        """Make an engine serve what is to be served, whatever it serves, also when that changes meanwhile."""
        checkpoint = None
        while checkpoint is None or checkpoint is not self._target:
            checkpoint = self._target
            assert checkpoint is not None  # noqa: S101  set by start
            label = await engine.label()
            patient = self._failed_syncs[engine.name] < _PATIENT_SYNCS
            with self._pool.returning(engine.name) if patient else nullcontext():
                await self._sync(engine, checkpoint, loaded=label == checkpoint.label)
        self._pool.serves(engine.name, checkpoint)

    async def _sync(self, engine: Engine, checkpoint: Checkpoint, *, loaded: bool = False) -> None:
        """Bring one engine to a version. `loaded`: it has the weights, and is only made sure to serve them."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with self._one_sync[engine.name]:
            self._failed_syncs[engine.name] += 1
            try:
                if not loaded:
                    await engine.prepare(checkpoint)
                    await engine.transfer(checkpoint)
                await engine.commit(checkpoint)
            except BaseException:
                await asyncio.shield(engine.abandon())
                raise
            finally:
                self._unpublished_seconds += loop.time() - started
            self._failed_syncs[engine.name] = 0

    def _publish(self, *, first: bool = False) -> None:
        """Publish what all engines serve that serve at all, if that is news."""
        version = self._pool.version
        if first or version > self._watch.now.version:
            names = tuple(engine.name for engine in self._pool.serving)
            self._record(Published(self._clock(), version, names, 0.0 if first else self._unpublished_seconds))
            self._unpublished_seconds = 0.0
