"""The watchdog notices when nothing moves any more, and names the stage that is blocked (`rules.stall`).

`Pulse` knows when the run moved last, and which calls of the stages are under way; the watchdog sleeps until that is `stall_seconds` ago,
reports, and reports again after twice that time, four times, and so on. With `exit_on_stall` the report ends the run: Stalled. A run that
is paused says so, and goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from headway.errors import Stalled
from headway.events import AnyEvent, EngineState
from headway.flow.watch import Watch
from headway.rules.admission import GateLimits
from headway.rules.stall import Scene, Stage, blocked_stage, moves, report

_log = logging.getLogger("headway")

P = ParamSpec("P")
Result = TypeVar("Result")


class Pulse:
    """When the run moved last and by what, and since when calls of a stage are under way."""

    def __init__(self) -> None:
        self.moved_at: float | None = None  # loop time; None: not yet
        self.last = "none"
        self.engines: dict[str, str] = {}
        self._calls: dict[str, dict[object, float]] = {}

    def heed(self, event: AnyEvent) -> None:
        """Hear of an event that was applied to the ledger."""
        if isinstance(event, EngineState):
            self.engines[event.engine] = f"{event.state} {event.label}"
            if event.state == "left":
                del self.engines[event.engine]
        if moves(event):
            self.beat(type(event).__name__)

    def beat(self, what: str) -> None:
        """Hear that the run has moved."""
        self.moved_at = asyncio.get_running_loop().time()
        self.last = what

    def around(self, stage: str, call: Callable[P, Awaitable[Result]], *, moves: bool = False) -> Callable[P, Awaitable[Result]]:
        """Return `call`, watched: how long it has been under way is known, and with `moves` its end moves the run."""
        calls = self._calls.setdefault(stage, {})

        async def watched(*args: P.args, **kwargs: P.kwargs) -> Result:
            key = object()
            calls[key] = asyncio.get_running_loop().time()
            try:
                result = await call(*args, **kwargs)
            finally:
                del calls[key]
            if moves:
                self.beat(stage)
            return result

        return watched

    def seconds(self, stage: str) -> float:
        """Return how long the longest call of a stage has been under way; 0: none is."""
        since = min(self._calls.get(stage, {}).values(), default=None)
        return 0.0 if since is None else asyncio.get_running_loop().time() - since


class Watchdog:
    """Reports stalls. `look(idle_seconds, late_seconds)` gives what is to be seen beside the ledger."""

    def __init__(
        self,
        *,
        pulse: Pulse,
        watch: Watch,
        limits: GateLimits,
        look: Callable[[float, float], Scene],
        stall_seconds: float,
        exit_on_stall: bool = False,
    ) -> None:
        self._pulse = pulse
        self._watch = watch
        self._limits = limits
        self._look = look
        self._stall_seconds = stall_seconds
        self._exit_on_stall = exit_on_stall
        self._ends_by: Stage | None = None  # the stage whose stall ends the run

    async def run(self) -> None:
        """Watch until cancelled. Raises Stalled where a stall is to end the run."""
        loop = asyncio.get_running_loop()
        if self._pulse.moved_at is None:
            self._pulse.beat("the start")
        seen, distance = self._pulse.moved_at, self._stall_seconds
        while self._stall_seconds:
            due = (seen or 0.0) + distance
            await asyncio.sleep(due - loop.time())
            late = loop.time() - due
            if self._pulse.moved_at != seen:
                seen, distance = self._pulse.moved_at, self._stall_seconds
                if late < self._stall_seconds:  # otherwise the loop itself stood still, and has moved as soon as it could
                    continue
            self._report(late)
            distance *= 2

    def snapshot(self) -> Mapping[str, Any]:
        """Return how long ago the run moved, and the stage that is blocked if that is too long."""
        idle = self._idle_seconds()
        stage = self._ends_by
        if stage is None and 0 < self._stall_seconds <= idle:
            found = blocked_stage(self._watch.now, self._limits, self._look(idle, 0.0)).stage
            stage = None if found == "paused" else found
        return {"seconds_since_progress": idle, "stalled_stage": stage}

    def _idle_seconds(self) -> float:
        moved_at = self._pulse.moved_at
        return 0.0 if moved_at is None else asyncio.get_running_loop().time() - moved_at

    def _report(self, late: float) -> None:
        ledger, scene = self._watch.now, self._look(max(self._idle_seconds(), late), late)
        stall = blocked_stage(ledger, self._limits, scene)
        text = report(stall, ledger, self._limits, scene)
        if stall.stage == "paused":
            _log.info("%s", text)
            return
        _log.warning("%s", text)
        if self._exit_on_stall:
            self._ends_by = stall.stage
            raise Stalled(f'{text} (run.stall_seconds, run.on_stall = "exit")')
