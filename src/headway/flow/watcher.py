"""The weight watcher brings every new version to every engine that serves, and publishes it when all of them serve it.

Two tasks: one hears of complete checkpoints and acknowledges the batches behind them at once (so that the next batch may be formed while
engines still load); the other syncs the newest one, with all engines at once or (`rolling`) with one after the other while the others
generate, skipping versions that were overtaken meanwhile (by what comes while engines are only drained, too). What is published is what
the slowest of them serves. A sync waits for a running evaluation up to its hold. One whose sync fails is lost, and the others are
published without it. `take_up` gives a lost engine, or one that has joined, what is served now, and counts on it from then on.

`publish_every`: engines are given every n-th version, and each once the run drains, the last above all. `publish_lag` (for studies): the
version that is served is that many before the newest.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from headway.errors import EngineFailed, EngineUnreachable, TrainerFailed
from headway.events import AnyEvent, BatchAcknowledged, Published
from headway.flow.engine_pool import EnginePool
from headway.flow.engine_syncs import EngineSyncs
from headway.flow.watch import Watch
from headway.protocols import Engine, Trainer
from headway.rules.scheduling import publication_due, sync_must_wait
from headway.settings import EvalSection
from headway.types import Checkpoint, Transferred

_log = logging.getLogger("headway")
_KNOCK_SECONDS = 1.0  # between two tries to reach an engine that is not up yet


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
        publish_every: int = 1,
        rolling: bool = False,
        start_timeout_seconds: float = 0.0,
        transferred: Callable[[Transferred], None] = lambda _: None,
    ) -> None:
        self._trainer = trainer
        self._pool = pool
        self._watch = watch
        self._record = record
        self._evaluation = evaluation
        self._steps = steps
        self._clock = clock
        self._publish_lag = publish_lag
        self._publish_every = publish_every
        self._rolling = rolling
        self._start_timeout_seconds = start_timeout_seconds
        self._seen: deque[Checkpoint] = deque()  # oldest first: what may be served, and what is newer
        self._newest: tuple[Checkpoint, float] | None = None
        self._syncs = EngineSyncs(pool, transferred=transferred)
        self._arrived = asyncio.Event()
        self._aimed_at = 0.0  # when what engines are being given was found
        self.syncing = False
        self.poll_to_serve_seconds = 0.0  # of the latest publication
        self.sync_seconds = 0.0  # in all

    async def start(self, checkpoint: Checkpoint) -> None:
        """Make every engine that there is serve the version that the run starts from, and publish it; without any, that is for later.

        An engine that cannot be reached, or does not answer, may not be up yet: it has `start_timeout_seconds` (0: it must be reached, and
        answers when it likes). Raises EngineFailed, StorageError.
        """
        self._syncs.aim(checkpoint)
        async with asyncio.TaskGroup() as tasks:
            for engine in self._pool.engines:
                tasks.create_task(self._bring_first(engine), name=f"weights: {engine.name}")
        self._seen.append(checkpoint)
        if self._pool.serving:
            self._publish(first=True)

    async def take_up(self, engine: Engine) -> None:
        """Give a lost engine what is served, and count on it again. Raises EngineFailed, StorageError."""
        await self._syncs.bring(engine)
        self._publish()

    async def let_go(self, engine: Engine) -> None:
        """Do nothing more to an engine that has left: returns once nothing is under way there."""
        await self._syncs.let_go(engine)

    async def run(self) -> None:
        """Follow the trainer until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="weight watcher: follow")
            tasks.create_task(self._serve(), name="weight watcher: serve")
            tasks.create_task(self._offer_the_last(), name="weight watcher: offer the last")

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
            self._offer()

    async def _offer_the_last(self) -> None:
        await self._watch.until(lambda now: bool(now.draining))
        self._offer()

    def _offer(self) -> None:
        """Have the engines given the newest version, if it is its turn."""
        now = self._watch.now
        if not self._seen or (due := self._due()).version <= (offered := self._newest[0].version if self._newest else now.version):
            return
        if now.draining or publication_due(due.version, offered, self._publish_every):
            self._newest = (due, asyncio.get_running_loop().time())
            self._arrived.set()
            if self._syncs.aim_again(due):
                self._aimed_at = self._newest[1]

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
            assert self._newest is not None  # noqa: S101 -- it is what has arrived
            if self._syncs.reached(self._newest[0]):  # it has overtaken the one before
                self._arrived.clear()
                continue
            if self._evaluation is not None and sync_must_wait(self._watch.now, self._evaluation):
                await self._hold(self._evaluation)
            self._arrived.clear()
            target, self._aimed_at = self._newest
            self._syncs.aim(target)
            started = loop.time()
            self.syncing = True
            try:
                await self._sync_all()
            finally:
                self.syncing = False
            self._publish()
            self.sync_seconds += loop.time() - started
            self.poll_to_serve_seconds = loop.time() - self._aimed_at

    async def _sync_all(self) -> None:
        if self._rolling:
            for engine in self._pool.serving:
                await self._syncs.update(engine)
            return
        async with asyncio.TaskGroup() as tasks:
            for engine in self._pool.serving:
                tasks.create_task(self._syncs.update(engine), name=f"weights: {engine.name}")

    async def _hold(self, evaluation: EvalSection) -> None:
        try:
            async with asyncio.timeout(evaluation.hold_seconds):
                await self._watch.until(lambda now: not sync_must_wait(now, evaluation))
        except TimeoutError:
            return  # the evaluation is flagged mixed by who runs it: the version changes under it

    async def _bring_first(self, engine: Engine) -> None:
        loop, limit = asyncio.get_running_loop(), self._start_timeout_seconds
        give_up, warned = loop.time() + limit, False
        while True:
            try:
                return await self._syncs.bring(engine, answers_by=give_up if limit else None)
            except EngineFailed as error:
                if self._pool.is_returning(engine.name):
                    await self._pool.returned(engine.name)
                    give_up = loop.time() + limit
                elif not isinstance(error, EngineUnreachable) or loop.time() + _KNOCK_SECONDS > give_up:
                    raise
                elif not warned:
                    warned = True
                    _log.warning("%s. It may not be up yet: it has %g s (engine.start_timeout_seconds)", error, limit)
            await asyncio.sleep(_KNOCK_SECONDS)

    def _publish(self, *, first: bool = False) -> None:
        """Publish what all engines serve that serve at all, if that is news."""
        version = self._pool.version
        if first or version > self._watch.now.version:
            names = tuple(engine.name for engine in self._pool.serving)
            self._record(Published(self._clock(), version, names, 0.0 if first else self._syncs.unpublished_seconds))
            self._syncs.unpublished_seconds = 0.0
