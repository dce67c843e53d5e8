"""The engine roster has engines join and leave the pool as the list of those that are wanted changes, while the run goes on.

An engine that leaves is sent nothing new; once it has left, what is under way there is ended, and its client closed. One that is wanted
again before that stays; at the same URL nobody joins until then: a server has one client at a time. Names are never used twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence

from headway.flow.engine_pool import EnginePool
from headway.protocols import Engine
from headway.rules.scheduling import roster_change
from headway.types import EngineAddress


class EngineRoster:
    """Keeps a pool as `wanted` says, beside the engines that it holds already.

    `make`: makes the client of an engine, by name and address; `let_go`: ends what is under way at an engine that has left.
    """

    def __init__(
        self,
        wanted: AsyncIterable[Sequence[EngineAddress]],
        *,
        make: Callable[[str, EngineAddress], Engine],
        pool: EnginePool,
        let_go: Callable[[Engine], Awaitable[None]],
    ) -> None:
        self._lists = wanted
        self._make = make
        self._pool = pool
        self._let_go = let_go
        self._fixed = [engine.url for engine in pool.engines]
        self._named = len(self._fixed)
        self._wanted: Mapping[str, EngineAddress] = {}
        self._here: dict[str, tuple[EngineAddress, Engine]] = {}
        self._leaving: set[str] = set()

    async def run(self) -> None:
        """Follow the list until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            async for addresses in self._lists:
                self._wanted = {address.url: address for address in addresses}
                self._change(tasks)

    def _change(self, tasks: asyncio.TaskGroup) -> None:
        change = roster_change({name: address for name, (address, _) in self._here.items()}, self._wanted, self._fixed)
        for name in change.stay:
            self._pool.stays(name)
        for name in change.leave:
            self._pool.leaves(name)
            if name not in self._leaving:
                self._leaving.add(name)
                tasks.create_task(self._see_off(name, tasks), name=f"see off {name}")
        for url in change.join:
            name, address = f"engine-{self._named}", self._wanted[url]
            self._named += 1
            engine = self._make(name, address)
            self._here[name] = (address, engine)
            self._pool.joins(engine)

    async def _see_off(self, name: str, tasks: asyncio.TaskGroup) -> None:
        left = await self._pool.has_left(name)
        if left:
            engine = self._here[name][1]
            await self._let_go(engine)
            await engine.close()
            del self._here[name]
        self._leaving.discard(name)
        if left:
            self._change(tasks)  # it may be wanted again by now
