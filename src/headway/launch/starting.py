"""Children that start together: all are ready, or the first that ends before is raised at once, whatever the others still do.

A start that takes long is told about: how long it has taken, how long it may, and what its log said last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headway.launch.processes import ChildProcess
from headway.launch.telling import tell

TELL_SECONDS = 15.0  # a person at a terminal wonders by then
_SHOWN = 120  # characters of a line of a log
_log = logging.getLogger("headway")


@dataclass(frozen=True)
class Start:
    """A child to be started: `begin` starts it, and it has `limit_seconds` from then on to be ready."""

    name: str
    begin: Callable[[], Awaitable[ChildProcess]]
    limit_seconds: float


async def all_ready(starts: Sequence[Start]) -> dict[str, dict[str, Any]]:
    """Start all; return the facts that they tell, by name. Raises (in a group) what a child's failure is raised as."""
    facts: dict[str, dict[str, Any]] = {}
    watching: list[asyncio.Task[None]] = []

    async def one(start: Start) -> None:
        child = await start.begin()
        watching.append(starting.create_task(child.watch(), name=f"watch {start.name}"))
        facts[start.name] = await told_about(child, start.limit_seconds)
        _log.info("%s is ready: %s", start.name, facts[start.name])

    async with asyncio.TaskGroup() as starting:
        ready = [starting.create_task(one(start), name=f"start {start.name}") for start in starts]
        if ready:
            await asyncio.wait(ready)
        for task in watching:
            task.cancel()
    return facts


async def told_about(child: ChildProcess, limit_seconds: float, *, tell_seconds: float = TELL_SECONDS) -> dict[str, Any]:
    """Wait until a child is ready, telling the person at the terminal how it gets on; see `ChildProcess.ready`."""

    async def telling() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            await asyncio.sleep(tell_seconds)
            said = await asyncio.to_thread(lambda: child.last_words)
            shown = f': "{said[:_SHOWN]}{"..." if len(said) > _SHOWN else ""}"' if said else f"; its log: {child.log}"
            tell(f"{child.name} is starting, {loop.time() - began:.0f} s of at most {limit_seconds:g} s{shown}", level=logging.INFO)

    talker = asyncio.create_task(telling(), name=f"tell about {child.name}")
    try:
        return await child.ready(limit_seconds)
    finally:
        talker.cancel()
