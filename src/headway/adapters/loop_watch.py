"""Watches the event loop from a thread: how late it turns, and, when it does not turn at all, which line blocks it.

A heartbeat on the loop measures its lag, every `BEAT_SECONDS`; the thread looks at the time of the last beat once a second. A loop that has
not turned for 5 s is reported with the stack of its thread, again after 10, 20, 40 s, and so on. A process that was stopped itself (Ctrl-Z,
a debugger) is no blocked loop. Nothing of this runs on virtual time.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import PurePath

_ASYNCIO = PurePath(asyncio.__file__).parent
BEAT_SECONDS = 0.05
LOOK_SECONDS = 1.0
BLOCKED_SECONDS = 5.0


class LoopWatch:
    """Reports a blocked loop by `report(text)`, and calls `stuck(text)` once it has been blocked for `stuck_seconds` (0: never).

    Both are called in the watching thread and must not wait for the loop.
    """

    def __init__(
        self,
        *,
        report: Callable[[str], None],
        stuck: Callable[[str], None] = lambda _: None,
        stuck_seconds: float = 0.0,
        blocked_seconds: float = BLOCKED_SECONDS,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._report = report
        self._stuck = stuck
        self._stuck_seconds = stuck_seconds or math.inf
        self._blocked_seconds = blocked_seconds
        self._look_seconds = min(look_seconds, blocked_seconds / 2)
        self._lags: list[float] = []
        self._beat_at = time.monotonic()
        self._thread_id = 0
        self._over = threading.Event()

    async def run(self) -> None:
        """Beat and be watched, until cancelled."""
        self._thread_id = threading.get_ident()
        self._beat_at = time.monotonic()
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()
        try:
            while True:
                due = time.monotonic() + BEAT_SECONDS
                await asyncio.sleep(BEAT_SECONDS)
                self._beat_at = time.monotonic()
                self._lags.append(max(0.0, self._beat_at - due))
        finally:
            self._over.set()

    def lag(self) -> tuple[float, float]:
        """Return the 99th percentile and the maximum of the loop's lag in seconds since the last call."""
        lags, self._lags = sorted(self._lags), []
        return (lags[math.ceil(0.99 * len(lags)) - 1], lags[-1]) if lags else (0.0, 0.0)

    def blocked_at(self) -> str:
        """Return the line that blocks the loop, from any thread; "" while the loop turns, or is not watched."""
        if not self._thread_id or self._over.is_set() or time.monotonic() - self._beat_at < self._blocked_seconds:
            return ""
        return (stack_of(self._thread_id) or ["unknown"])[-1]

    def _watch(self) -> None:
        threshold = self._blocked_seconds
        looked_at = time.monotonic()
        while not self._over.wait(self._look_seconds):
            now = time.monotonic()
            if now - looked_at > 2 * self._look_seconds + 1.0:  # this thread did not run either: the whole process was stopped
                self._beat_at = now
            looked_at = now
            blocked = now - self._beat_at
            if blocked < self._blocked_seconds:
                threshold = self._blocked_seconds
                continue
            if blocked >= threshold:
                threshold = 2 * threshold
                self._say(blocked, self._report)
            if blocked >= self._stuck_seconds:
                self._stuck_seconds = math.inf
                self._say(blocked, self._stuck)

    def _say(self, blocked: float, to: Callable[[str], None]) -> None:
        stack = stack_of(self._thread_id)
        line = stack[-1] if stack else "unknown"
        with suppress(Exception):  # whoever cannot be told: the watch goes on
            to(f"the event loop has not turned for {blocked:.0f} s: it is blocked at {line}\n" + "\n".join(f"  {entry}" for entry in stack))


def stack_of(thread_id: int) -> list[str]:
    """Return the stack of a thread of this process, one line a frame, the innermost last; of a loop's thread, what the loop has called."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return []
    stack = traceback.extract_stack(frame)
    of_the_loop = [number for number, entry in enumerate(stack[:-1]) if PurePath(entry.filename).parent == _ASYNCIO]
    called = stack[of_the_loop[-1] + 1 :] if of_the_loop else stack
    return [f"{entry.filename}:{entry.lineno} in {entry.name}: {entry.line or ''}".rstrip(": ") for entry in called]
