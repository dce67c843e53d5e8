"""The pacer follows `rollout.steps_ahead = "auto"`: how far admission runs ahead, by what the run has measured.

Slow on purpose, since what it measures depends on what it sets (`rules.pacing`): half a batch at a time, batches apart. Each change is an
event, so the journal knows with which A a group was admitted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from headway.events import AnyEvent, PaceChanged
from headway.flow.watch import Watch
from headway.rules.admission import GateLimits, steps_ahead
from headway.rules.pacing import change_due, next_steps_ahead

_log = logging.getLogger("headway")


class Pacer:
    """Changes A, never above max_staleness, where more or less of it is needed to keep the trainer busy."""

    def __init__(self, limits: GateLimits, *, watch: Watch, record: Callable[[AnyEvent], None], clock: Callable[[], float]) -> None:
        self._limits = limits
        self._watch = watch
        self._record = record
        self._clock = clock

    async def run(self) -> None:
        """Look at the pace every few batches, until cancelled."""
        ledger = self._watch.now
        looked_at = ledger.trained
        while True:
            await self._watch.until(lambda now, at=looked_at: change_due(now.trained, at))  # type: ignore[misc]
            looked_at = ledger.trained
            now = steps_ahead(ledger, self._limits)
            chosen = next_steps_ahead(now, ledger.latency_seconds, ledger.cycle_seconds, self._limits.max_staleness)
            if chosen != now:
                _log.info(
                    "steps_ahead %g -> %g: a group takes %.3g s, a batch %.3g s", now, chosen, ledger.latency_seconds, ledger.cycle_seconds
                )
                self._record(PaceChanged(self._clock(), chosen, ledger.latency_seconds, ledger.cycle_seconds))
