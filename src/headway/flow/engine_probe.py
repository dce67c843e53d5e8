"""The engine probe looks after engines, beside the path: each is there, with the weights it was given, or it is lost, and brought back.

A look is one light call (the version label). An engine that refuses it, or names another label, is lost at once: it has died, or was
started anew. One that does not answer is busy until it has been silent for `SILENCE_SECONDS`. It is looked at every few seconds, and at
once when an attempt there has failed, so that the attempt's failure is not blamed on the rollout. While weights are synced a look finds out
only whether anybody is there: the sync has limits of its own. A lost engine is tried again for ever, with backoff; how long a run can do
without is the pool's to say. An engine that has joined is looked after like a lost one; one that has left is let alone.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from math import ceil

from headway.errors import EngineFailed, EngineSilent, EngineUnreachable
from headway.flow.engine_pool import EnginePool, Place
from headway.protocols import Engine
from headway.rules.scheduling import backoff_seconds

LOOK_SECONDS = 5.0
ANSWER_SECONDS = 10.0
SILENCE_SECONDS = 60.0
_SILENT_LOOKS = ceil(SILENCE_SECONDS / ANSWER_SECONDS)
_FIRST_RETRY_SECONDS = 0.25
_LONGEST_RETRY_SECONDS = 5.0


class EngineProbe:
    """Looks at the engines of a pool. `take_up`: gives an engine the weights that it is to serve; raises EngineFailed."""

    def __init__(self, pool: EnginePool, *, take_up: Callable[[Engine], Awaitable[None]]) -> None:
        self._pool = pool
        self._take_up = take_up
        self._doubts: dict[str, asyncio.Future[None]] = {}
        self._doubted: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._jitter = random.Random(0)  # noqa: S311 -- spreads retries, hides nothing

    async def lost_since(self, place: Place) -> bool:
        """Whether an attempt that has failed lost its engine: looks at the engine now."""
        if not self._pool.lost_since(place) and self._pool.state(place.name) != "left":
            doubt = self._doubts.get(place.name)
            if doubt is None:
                doubt = self._doubts[place.name] = asyncio.get_running_loop().create_future()
                self._doubted[place.name].set()
            await asyncio.shield(doubt)
        return self._pool.lost_since(place)

    async def run(self) -> None:
        """Look after all engines, those that join included, until cancelled."""
        looking: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                here = {engine.name: engine for engine in self._pool.engines}
                for name in [name for name in looking if name not in here]:
                    looking.pop(name).cancel()
                    self._doubted.pop(name, None)
                    self._answer(self._doubts.pop(name, None))
                for name, engine in here.items():
                    if name not in looking:
                        looking[name] = tasks.create_task(self._look_after(engine), name=f"look after {name}")
                await self._pool.until_others(looking)

    async def _look_after(self, engine: Engine) -> None:
        silent = tries = 0
        loop = asyncio.get_running_loop()
        gone_since: float | None = None
        while True:
            if self._pool.state(engine.name) == "lost":
                gone_since = loop.time() if gone_since is None else gone_since
                self._answer(self._doubts.pop(engine.name, None))
                tries = 0 if await self._returned(engine, gone_since) else tries + 1
                silent = 0
                if tries:
                    wait = backoff_seconds(tries, self._jitter.random(), first=_FIRST_RETRY_SECONDS, longest=_LONGEST_RETRY_SECONDS)
                    await asyncio.sleep(wait)
                continue
            gone_since = None
            await self._until_doubted(engine.name)
            doubt = self._doubts.pop(engine.name, None)
            try:
                silent = 0 if await self._answers(engine) else silent + 1
                if silent >= _SILENT_LOOKS:
                    self._pool.lost(engine.name, EngineFailed(f"it has not answered for {SILENCE_SECONDS:g} s"), hangs=True)
            finally:
                self._answer(doubt)

    async def _until_doubted(self, name: str) -> None:
        doubted = self._doubted[name]
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await doubted.wait()
        except TimeoutError:
            return
        finally:
            doubted.clear()

    @staticmethod
    def _answer(doubt: asyncio.Future[None] | None) -> None:
        if doubt is not None and not doubt.done():
            doubt.set_result(None)

    async def _answers(self, engine: Engine) -> bool:
        """Look once; an engine that is gone, or is not what it was, is lost. False: it did not answer, which may mean that it is busy."""
        name, pool = engine.name, self._pool
        given = pool.label(name)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                label = await engine.label()
        except (TimeoutError, EngineSilent):
            return pool.state(name) == "syncing"
        except EngineFailed as error:
            # A sync tells by itself how it failed; that nobody is there is told at once, as attempts that failed there wait for it.
            if pool.state(name) == "serving" or isinstance(error, EngineUnreachable):
                pool.lost(name, error)
            return True
        if label != given == pool.label(name) and pool.state(name) == "serving":
            pool.lost(name, EngineFailed(f'it serves "{label}" and was given "{given}": it was started anew, or another run uses it'))
        return True

    async def _returned(self, engine: Engine, gone_since: float) -> bool:
        """Bring a lost engine back. One that has been out of reach, or silent, for long answers nothing that was asked of it, either."""
        try:
            await self._take_up(engine)
        except EngineFailed as error:
            gone_seconds = asyncio.get_running_loop().time() - gone_since
            vanished = isinstance(error, (EngineUnreachable, EngineSilent)) and gone_seconds >= SILENCE_SECONDS
            self._pool.lost(engine.name, error, hangs=vanished)
            return False
        return True
