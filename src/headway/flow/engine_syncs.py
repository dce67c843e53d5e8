"""Weight syncs, engine by engine: prepare, transfer, commit; one at a time at an engine, and none leaves it paused.

Where rollouts are not to have tokens of two versions (engine.weight_sync = "wait"), an engine is drained first, and gets the version that
is newest by then, if none has begun to load the one before. One that comes back is rid of the rollouts that its old weights had begun.

However a sync ends (it fails, it is cancelled, the engine has left the run), the engine is told to go on with what it has.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext

from headway.errors import EngineFailed, EngineSilent
from headway.flow.engine_pool import EnginePool
from headway.protocols import Engine
from headway.types import Checkpoint, Transferred

_PATIENT_SYNCS = 3  # failed syncs of a lost engine in a row that may take their time; later ones do not hold up the end of the run


class EngineSyncs:
    """Brings versions to single engines of a pool. `target`: what engines serve or are being given; `aim` before the first sync.

    `transferred` hears of each transfer that went well.
    """

    def __init__(self, pool: EnginePool, *, transferred: Callable[[Transferred], None] = lambda _: None) -> None:
        self.target: Checkpoint | None = None
        self.unpublished_seconds = 0.0  # what syncs took, summed over engines, since this was set to 0
        self._pool = pool
        self._transferred = transferred
        self._draining = 0  # engines that are drained for the target
        self._loads = False  # an engine has begun to load it
        self._one_sync: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._failed: defaultdict[str, int] = defaultdict(int)  # syncs of lost engines, in a row
        self._updates: dict[str, asyncio.Task[None]] = {}

    def aim(self, target: Checkpoint) -> None:
        """Give the engines this version from now on."""
        self.target, self._loads = target, False

    def aim_again(self, target: Checkpoint) -> bool:
        """Give engines that are still drained this version instead; False: there are none, or one has begun to load the one before."""
        if self._loads or not self._draining:
            return False
        self.target = target
        return True

    def reached(self, checkpoint: Checkpoint) -> bool:
        """Whether this is the target, and all engines that serve serve it."""
        return checkpoint is self.target and all(self._pool.label(engine.name) == checkpoint.label for engine in self._pool.serving)

    async def update(self, engine: Engine) -> None:
        """Bring the target to an engine that serves, unless it serves it; when that fails, the engine is lost."""
        name = engine.name
        if self._pool.state(name) != "serving" or self._pool.label(name) == self._aimed.label:
            return
        self._draining += 1
        try:
            if not await self._pool.drained(name):
                return
        finally:
            self._draining -= 1
        checkpoint, self._loads = self._aimed, True
        self._pool.syncs(name)
        self._updates[name] = sync = asyncio.create_task(self._update(engine, checkpoint), name=f"sync: {name}")
        try:
            await asyncio.wait([sync])
        finally:
            del self._updates[name]
            if not sync.done():
                sync.cancel()
                await _over(sync)
        if sync.cancelled():  # it has left
            return
        error = sync.exception()
        if error is None:
            self._pool.serves(name, checkpoint)
        elif isinstance(error, EngineFailed):
            self._pool.lost(name, error)
        else:
            raise error

    async def bring(self, engine: Engine, *, answers_by: float | None = None) -> None:
        """Make a lost engine serve what is to be served, whatever it serves, also when that changes meanwhile.

        `answers_by`: when engine.start_timeout_seconds are over, by the loop's clock: by then it must have said what it serves. Raises
        EngineFailed.
        """
        name = engine.name
        checkpoint: Checkpoint | None = None
        while checkpoint is None or checkpoint is not self.target:
            await _answer_of(engine, by=answers_by)
            patient = self._failed[name] < _PATIENT_SYNCS
            with self._pool.returning(name) if patient else nullcontext():
                async with self._one_sync[name]:
                    if self._pool.state(name) != "lost":  # the sync in which it was lost went well after all, or it has left
                        return
                    checkpoint = self._aimed
                    await self._pool.vacated(name, checkpoint.label)
                    await self._sync(engine, checkpoint, loaded=await engine.label() == checkpoint.label)
        self._pool.serves(name, checkpoint)

    async def let_go(self, engine: Engine) -> None:
        """Do nothing more to an engine that has left: returns once what was under way there has been ended."""
        if (sync := self._updates.get(engine.name)) is not None:
            sync.cancel()
        await self._pool.vacated(engine.name)
        async with self._one_sync[engine.name]:
            pass
        del self._one_sync[engine.name]
        self._failed.pop(engine.name, None)

    @property
    def _aimed(self) -> Checkpoint:
        assert self.target is not None  # noqa: S101  set before
        return self.target

    async def _update(self, engine: Engine, checkpoint: Checkpoint) -> None:
        async with self._one_sync[engine.name]:
            await self._sync(engine, checkpoint)

    async def _sync(self, engine: Engine, checkpoint: Checkpoint, *, loaded: bool = False) -> None:
        """Bring one engine to a version, within its lock. `loaded`: it has the weights, and is only made sure to serve them."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._failed[engine.name] += 1
        try:
            if not loaded:
                await engine.prepare(checkpoint)
                if (done := await engine.transfer(checkpoint)) is not None:
                    self._transferred(done)
            await engine.commit(checkpoint)
        except BaseException:
            await _over(asyncio.create_task(engine.abandon()))
            raise
        finally:
            self.unpublished_seconds += loop.time() - started
        self._failed[engine.name] = 0


async def _answer_of(engine: Engine, *, by: float | None) -> None:
    """Wait until an engine answers, however often it must be asked; `by` None: once. Raises EngineFailed."""
    try:
        async with asyncio.timeout_at(by):
            while True:
                try:
                    await engine.label()
                except EngineSilent:
                    if by is None:
                        raise
                else:
                    return
    except TimeoutError as late:
        raise EngineFailed(f"{engine.name}: {engine.url} has not answered in time (engine.start_timeout_seconds)") from late


async def _over(task: asyncio.Task[None]) -> None:
    """Wait until a task has ended; a cancellation that comes meanwhile, again when the run is stopped amid its end, is raised then."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
