"""What a run has opened and must close, each by its name: all at once, within one limit, and what hangs is named.

By the time that these are called, everything that matters is on disk: what fails to close is a warning, never the run's cause.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

_log = logging.getLogger("headway")
_CANCEL_SECONDS = 1.0  # for what hangs to be cancelled


class Closers:
    """The closing of workers, engines, trainer and exporters; they are independent of each other."""

    def __init__(self) -> None:
        self._closers: list[tuple[str, Callable[[], Awaitable[Any]]]] = []
        self._cut = asyncio.Event()

    def add(self, name: str, close: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
        """Have `close(*arguments)` awaited at the end."""
        self._closers.append((name, lambda: close(*arguments)))

    def add_blocking(self, name: str, close: Callable[[], None]) -> None:
        """Have `close` called at the end, in a thread of its own: it may block, and a process can end without it."""
        self._closers.append((name, lambda: _in_a_thread(name, close)))

    def cut_short(self) -> None:
        """Let `close_all` end now."""
        self._cut.set()

    async def close_all(self, limit_seconds: float) -> list[str]:
        """Close everything; return the names of what had not closed within the limit. What fails to close is logged."""
        closers, self._closers = self._closers, []
        tasks = {asyncio.create_task(_closed(name, close), name=f"close {name}"): name for name, close in closers}
        cut = asyncio.create_task(_set(self._cut))
        all_closed = asyncio.create_task(_ended(tasks))
        await asyncio.wait({all_closed, cut}, timeout=limit_seconds, return_when=asyncio.FIRST_COMPLETED)
        hung = [name for task, name in tasks.items() if not task.done()]
        waiting = {*tasks, all_closed, cut}
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting, timeout=_CANCEL_SECONDS)
        return hung


async def _set(event: asyncio.Event) -> None:
    await event.wait()


async def _ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        await asyncio.wait((task,))


async def _closed(name: str, close: Callable[[], Awaitable[Any]]) -> None:
    try:
        await close()
    except Exception as error:  # noqa: BLE001  the run is over and saved: whatever this is, the others close
        _log.warning("closing %s failed: %s: %s", name, type(error).__name__, error)


async def _in_a_thread(name: str, close: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def work() -> None:
        error = None
        try:
            close()
        except Exception as raised:  # noqa: BLE001  told to who waits
            error = raised
        with suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(tell, error)

    threading.Thread(target=work, name=f"close {name}", daemon=True).start()
    await done
