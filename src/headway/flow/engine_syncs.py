"""Weight syncs, engine by engine: prepare, transfer, commit; one at a time at an engine, and none leaves it paused.

However a sync ends (it fails, it is cancelled, the engine has left the run), the engine is told to go on with what it has.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import nullcontext

from headway.errors import EngineFailed
from headway.flow.engine_pool import EnginePool
from headway.protocols import Engine
from headway.types import Checkpoint

_PATIENT_SYNCS = 3  # failed syncs of a lost engine in a row that may take their time; later ones do not hold up the end of the run


class EngineSyncs:
    """Brings versions to single engines of a pool. `target`: what engines serve or are being given; set before the first sync."""

    def __init__(self, pool: EnginePool) -> None:
        self.target: Checkpoint | None = None
        self.unpublished_seconds = 0.0  # what syncs took, summed over engines, since this was set to 0
        self._pool = pool
        self._one_sync: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._failed: defaultdict[str, int] = defaultdict(int)  # syncs of lost engines, in a row
        self._updates: dict[str, asyncio.Task[None]] = {}

    async def update(self, engine: Engine, checkpoint: Checkpoint) -> None:
        """Bring a version to an engine that serves, unless it serves it; when that fails, the engine is lost."""
        name = engine.name
        if self._pool.state(name) != "serving" or self._pool.label(name) == checkpoint.label:
            return
        self._pool.syncs(name)
        self._updates[name] = sync = asyncio.create_task(self._sync(engine, checkpoint), name=f"sync: {name}")
        try:
            await asyncio.wait([sync])
        finally:
            del self._updates[name]
            if not sync.done():
                sync.cancel()
                await asyncio.wait([sync])
        if sync.cancelled():  # it has left
            return
        error = sync.exception()
        if error is None:
            self._pool.serves(name, checkpoint)
        elif isinstance(error, EngineFailed):
            self._pool.lost(name, error)
        else:
            raise error

    async def bring(self, engine: Engine) -> None:
        """Make an engine serve what is to be served, whatever it serves, also when that changes meanwhile. Raises EngineFailed."""
        checkpoint = None
        while checkpoint is None or checkpoint is not self.target:
            checkpoint = self.target
            assert checkpoint is not None  # noqa: S101  set before
            label = await engine.label()
            patient = self._failed[engine.name] < _PATIENT_SYNCS
            with self._pool.returning(engine.name) if patient else nullcontext():
                await self._sync(engine, checkpoint, loaded=label == checkpoint.label)
        self._pool.serves(engine.name, checkpoint)

    async def let_go(self, engine: Engine) -> None:
        """Do nothing more to an engine that has left: returns once what was under way there has been ended."""
        if (sync := self._updates.get(engine.name)) is not None:
            sync.cancel()
        async with self._one_sync[engine.name]:
            pass
        del self._one_sync[engine.name]
        self._failed.pop(engine.name, None)

    async def _sync(self, engine: Engine, checkpoint: Checkpoint, *, loaded: bool = False) -> None:
        """Bring one engine to a version. `loaded`: it has the weights, and is only made sure to serve them."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with self._one_sync[engine.name]:
            self._failed[engine.name] += 1
            try:
                if not loaded:
                    await engine.prepare(checkpoint)
                    await engine.transfer(checkpoint)
                await engine.commit(checkpoint)
            except BaseException:
                await asyncio.shield(engine.abandon())
                raise
            finally:
                self.unpublished_seconds += loop.time() - started
            self._failed[engine.name] = 0
