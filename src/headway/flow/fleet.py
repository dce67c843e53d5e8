"""The components that look after the engines, joined: pool, weight watcher, probe, roster and counts. Wiring; decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from typing import Any

from headway.events import AnyEvent
from headway.flow.engine_counts import EngineCounts
from headway.flow.engine_pool import EnginePool
from headway.flow.engine_probe import EngineProbe
from headway.flow.engine_roster import EngineRoster
from headway.flow.transfer_sums import TransferSums
from headway.flow.watch import Watch
from headway.flow.watcher import WeightWatcher
from headway.protocols import Engine, Trainer
from headway.settings import EngineSection, EvalSection
from headway.types import Checkpoint, EngineAddress


class Fleet:
    """All that has to do with engines. `engines` are there from the start; those that `roster` names join (clients: `make_engine`)."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        roster: AsyncIterable[Sequence[EngineAddress]] | None,
        make_engine: Callable[[str, EngineAddress], Engine] | None,
        trainer: Trainer,
        watch: Watch,
        record: Callable[[AnyEvent], None],
        clock: Callable[[], float],
        settings: EngineSection,
        evaluation: EvalSection | None,
        steps: int,
        publish_lag: int,
        publish_every: int,
    ) -> None:
        self.pool = EnginePool(
            engines,
            record=record,
            clock=clock,
            lost_timeout_seconds=settings.lost_timeout_seconds,
            start_timeout_seconds=settings.start_timeout_seconds,
            waits=settings.weight_sync == "wait",
        )
        self.counts = EngineCounts(engines)
        self.transfers = TransferSums()
        self.watcher = WeightWatcher(
            trainer=trainer,
            pool=self.pool,
            watch=watch,
            record=record,
            evaluation=evaluation,
            steps=steps,
            clock=clock,
            publish_lag=publish_lag,
            publish_every=publish_every,
            rolling=settings.sync_order == "rolling",
            start_timeout_seconds=settings.start_timeout_seconds,
            transferred=self.transfers.add,
        )
        self.probe = EngineProbe(self.pool, take_up=self._take_up)
        self.roster: EngineRoster | None = None
        if roster is not None and make_engine is not None:
            self.roster = EngineRoster(roster, make=make_engine, pool=self.pool, let_go=self._let_go)

    async def start(self, first: Checkpoint) -> None:
        """Make the engines that are there from the start serve the first weights, and publish them. Raises EngineFailed, StorageError."""
        await self.counts.start()
        await self.watcher.start(first)

    @property
    def services(self) -> list[Callable[[], Awaitable[None]]]:
        """What looks after the engines until the end of the run."""
        services: list[Callable[[], Awaitable[None]]] = [self.watcher.run, self.probe.run, self.pool.run]
        return services if self.roster is None else [*services, self.roster.run]

    def snapshot(self) -> Mapping[str, Any]:
        """Return the figures of the pipeline's rows."""
        return {
            "poll_to_serve_seconds": self.watcher.poll_to_serve_seconds,
            "sync_seconds": self.watcher.sync_seconds,
            "syncing": self.watcher.syncing,
            **self.transfers.snapshot(),
            "engine_load": dict(self.pool.load),
            "engines": dict(self.pool.states),
        }

    async def _take_up(self, engine: Engine) -> None:
        """Give a lost engine what is served; what one samples that has joined counts from when it serves for the first time on."""
        joins = not self.pool.label(engine.name)
        stood = await self.counts.stands(engine) if joins else None
        await self.watcher.take_up(engine)
        if joins:
            self.counts.joins(engine, stood)

    async def _let_go(self, engine: Engine) -> None:
        await self.watcher.let_go(engine)
        await self.counts.leaves(engine)
