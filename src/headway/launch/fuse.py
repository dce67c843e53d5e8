"""The limit of an end: whatever the event loop does, the process is gone when the time is up.

A thread of its own waits for the limit; nothing here waits for the event loop, for a lock that the main thread may hold, or for a disk
longer than a moment. What it calls when the time is up must end the process.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from headway.waiting import place_of


class _Limit(NamedTuple):
    due: float  # time.monotonic()
    why: str


class Fuse:
    """Calls `burnt(why)` from a thread once the limit that was set last has passed. `set` may be called in a signal handler."""

    def __init__(self, burnt: Callable[[str], None]) -> None:
        self._burnt = burnt
        self._limits: queue.SimpleQueue[_Limit | None] = queue.SimpleQueue()  # its `put` is reentrant, as a signal handler needs
        threading.Thread(target=self._wait, name="limit of the end", daemon=True).start()

    def set(self, seconds: float, why: str) -> None:
        """Be burnt in `seconds`, unless another limit is set before or the fuse is defused."""
        self._limits.put(_Limit(time.monotonic() + seconds, why))

    def defuse(self) -> None:
        """Never burn; the thread ends."""
        self._limits.put(None)

    def _wait(self) -> None:
        limit = _Limit(math.inf, "")
        while True:
            left = limit.due - time.monotonic()
            try:
                # a limit that is infinite, or longer than a thread can wait, is waited for in parts
                new = self._limits.get(timeout=min(max(left, 0.0), 3600.0))
            except queue.Empty:
                if left > 0:
                    continue
                self._burnt(limit.why)
                return
            if new is None:
                return
            limit = new


def within(seconds: float, work: Callable[[], Any]) -> bool:
    """Call `work` in a thread, and wait for it no longer than `seconds`; say whether it has ended. Errors in it are nobody's business."""

    def ignoring_errors() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=ignoring_errors, name="last words", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def waiting_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """Return which tasks of a loop wait and where, for people; callable from any thread."""
    try:
        tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    except RuntimeError:  # they change too quickly to be listed: the loop is not what hangs
        return "many tasks"
    places: dict[str, int] = {}
    for task in tasks:
        name = task.get_name()
        key = f"{'a task' if name.startswith('Task-') else name} ({place_of(task)})"
        places[key] = places.get(key, 0) + 1
    listed = [f"{count} x {place}" if count > 1 else place for place, count in sorted(places.items(), key=lambda item: -item[1])]
    return ", ".join(listed[:12]) or "no task"
