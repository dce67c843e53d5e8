"""Keeps one child alive: a child that dies is started again, up to `max_restarts` times in a row without having got on.

What a child states on purpose when it ends (a bound breached, a disk full, a bad config) would end alike again: that ends the run at once.
So does a child that is given up. In between nobody need know: an engine's pool waits, and the trainer's next version is only late.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext

from headway.errors import ConfigError, HeadwayError
from headway.launch.processes import ChildProcess
from headway.rules.scheduling import backoff_seconds

_log = logging.getLogger("headway")
_FIRST_WAIT_SECONDS = 0.25
_LONGEST_WAIT_SECONDS = 30.0


class Supervisor:
    """A child and its successors. `setting`: the key that bounds how often in a row it is started again; `restarts`: how often it was.

    `log`: where deaths and restarts are logged; which of these the terminal is told, too: `headway.launch.telling`.
    """

    def __init__(
        self, child: ChildProcess, *, max_restarts: int, setting: str, start_timeout_seconds: float, log: logging.Logger = _log
    ) -> None:
        self.child = child
        self.restarts = 0
        self._max_restarts = max_restarts
        self._setting = setting
        self._start_timeout_seconds = start_timeout_seconds
        self._log = log
        self._ended = ""
        self._stopping = False

    def failure(self) -> str | None:
        """Return why nothing more will come of this child, in one line; None while it runs or is being started again."""
        return self._ended or None

    async def run(
        self,
        *,
        again: Callable[[], Awaitable[ChildProcess]],
        progress: Callable[[], int],
        finished: Callable[[], bool] = lambda: False,
        died: Callable[[HeadwayError], None] = lambda _: None,
        meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Start the child again whenever it dies; returns once it has done its work or was stopped, and raises when it is given up.

        `again` starts one (its readiness is awaited here); `progress` grows as long as the child gets on; `finished`: whether one that
        ends with exit code 0 has done its work; `died` hears of each death that is not the end; a successor is started
        within `meanwhile`.
        """
        in_a_row, got_on = 0, progress()
        while True:
            error = await self.child.death()
            if error is None or self._stopping:
                return
            if self.child.exit_code == 0 and finished():
                self._ended = str(error)
                return
            while error is not None and not self._stopping:
                in_a_row = 1 if progress() > got_on else in_a_row + 1
                got_on = progress()
                if self.child.stated or in_a_row > self._max_restarts:
                    raise self._given_up(error, in_a_row - 1)
                died(error)
                with meanwhile():
                    error = await self._successor(again, error, in_a_row)

    async def stop(self, grace_seconds: float) -> int:
        """End the child for good: SIGTERM, then SIGKILL after `grace_seconds`. Returns its exit code; idempotent."""
        self._stopping = True
        return await self.child.stop(grace_seconds)

    async def _successor(self, again: Callable[[], Awaitable[ChildProcess]], error: HeadwayError, in_a_row: int) -> HeadwayError | None:
        """Start a successor and wait until it is ready; return why it is not."""
        wait = backoff_seconds(in_a_row, random.random(), first=_FIRST_WAIT_SECONDS, longest=_LONGEST_WAIT_SECONDS)  # noqa: S311 -- spreads retries
        self._log.warning(
            "%s. It is started again in %.1f s (%d of %s %d in a row)", error, wait, in_a_row, self._setting, self._max_restarts
        )
        before = self.child
        await asyncio.sleep(wait)
        await before.stop(0.0)  # it has ended: its line is closed
        self.restarts += 1
        try:
            self.child = await again()
            await self.child.ready(self._start_timeout_seconds)
        except HeadwayError as failed:
            await self.child.stop(0.0)
            return failed
        self._log.info("%s is up again", self.child.name)
        return None

    def _given_up(self, error: HeadwayError, restarts: int) -> HeadwayError:
        kind = self.child.error if isinstance(error, ConfigError) else type(error)  # the config was fine when the run began
        again = f"; it had been started again {restarts} times in a row ({self._setting})" if restarts and not self.child.stated else ""
        self._ended = f"{error}{again}"
        given_up = kind(self._ended, detail=error.detail)
        given_up.__cause__ = error
        return given_up
