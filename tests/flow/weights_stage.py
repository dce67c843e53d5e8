"""A weight watcher on a stage: a trainer that publishes when told to, engines of the simulation, their pool and its probe."""

import asyncio
from typing import Any

from doubles import Spine, checkpoint

from headway.events import BatchAcknowledged, Published
from headway.flow.engine_pool import EnginePool
from headway.flow.engine_probe import EngineProbe
from headway.flow.watcher import WeightWatcher
from headway.sim.engine import EngineSettings, SimEngine


class Trainer:
    """A trainer whose versions appear when the test says so; `checkpoint` gives the newest, as the real one does."""

    def __init__(self, spine):
        self.spine = spine
        self.version = 0
        self.changed = asyncio.Event()
        self.asked = 0

    async def checkpoint(self, after):
        self.asked += 1
        while self.version <= after:
            self.changed.clear()
            await self.changed.wait()
        return checkpoint(self.version)

    def publish(self, version, *, formed=None):
        while self.spine.ledger.next_batch < (version if formed is None else formed):
            self.spine.form()
        self.version = version
        self.changed.set()


class Stage:
    def __init__(
        self,
        *engines,
        evaluation=None,
        lost_timeout_seconds=60.0,
        start_timeout_seconds=0.0,
        steps=100,
        published=True,
        labels=("line-0",) * 9,
        publish_lag=0,
        publish_every=1,
        rolling=False,
        waits=False,
    ):
        self.spine = Spine(published=published)
        trainer: Any = Trainer(self.spine)  # as much of one as weights need
        self.trainer = trainer
        settings = engines or (EngineSettings(),)
        self.engines = [SimEngine(f"e{n}", setting, label=label) for n, (setting, label) in enumerate(zip(settings, labels, strict=False))]
        self.pool = EnginePool(
            self.engines, record=self.spine.record, clock=self.spine.clock, lost_timeout_seconds=lost_timeout_seconds, waits=waits
        )
        if published:
            for engine in self.engines:
                self.pool.serves(engine.name, checkpoint(0))
        self.spine.events[:] = self.spine.of(Published)
        self.watcher = WeightWatcher(
            trainer=self.trainer,
            pool=self.pool,
            watch=self.spine.watch,
            record=self.spine.record,
            evaluation=evaluation,
            steps=steps,
            clock=self.spine.clock,
            publish_lag=publish_lag,
            publish_every=publish_every,
            rolling=rolling,
            start_timeout_seconds=start_timeout_seconds,
        )
        self.probe = EngineProbe(self.pool, take_up=self.watcher.take_up)

    async def begun(self):
        """Start, and return watcher, probe and pool, to be run beside a test; what `of` tells begins here."""
        await self.watcher.start(checkpoint(0))
        self.spine.events.clear()
        return self.watcher.run(), self.probe.run(), self.pool.run()

    def history(self):
        return [
            ("published", e.version) if isinstance(e, Published) else ("trained", e.k)
            for e in self.spine.events
            if isinstance(e, Published | BatchAcknowledged)
        ]


def slow(seconds, **more):
    return EngineSettings(transfer_seconds=seconds, **more)
