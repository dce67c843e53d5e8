"""Stands beside a run that is played and notes what its history does not tell: the gate, what the trainer waits for, how much is in flight.

It is shown the ledger at each turn of the loop in which something has changed, so that what it notes is exact and costs a few microseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.rules.admission import CapacityReason, GateLimits
from headway.rules.batching import trainer_waits_for
from headway.rules.view import LedgerView

DOWN = "the orchestrator is down"


class Window(NamedTuple):
    """The batches that are looked at: from `warm_up` on, before `batches`. `progress` is told how many are trained, as it changes."""

    warm_up: int
    batches: int
    progress: Callable[[int], None] | None = None


@dataclass(slots=True)
class Counters:
    """What the world has counted by some instant, over all its engines: `sequences` are sequence seconds by engine."""

    sampled: int = 0
    preemptions: int = 0
    sequences: dict[str, float] = field(default_factory=dict)


class Observer:
    """Notes when the window's batches were trained (`start`, `end`) and what was in that time; `count` is asked at both of its ends."""

    def __init__(self, limits: GateLimits, window: Window, *, count: Callable[[], Counters]) -> None:
        self.start: float | None = None
        self.end: float | None = None
        self.at_start = self.at_end = Counters()
        self.gate: list[tuple[float, str]] = []
        self.waits: list[tuple[float, str]] = []
        self.in_flight_max = self.ready_groups_max = 0
        self._limits = limits
        self._window = window
        self._count = count
        self._in_flight = self._trained = 0
        self._since = self._rollout_seconds = 0.0

    @property
    def in_flight_mean(self) -> float:
        """Training rollouts in flight, mean over the window; 0 before its end."""
        if self.start is None or self.end is None:
            return 0.0
        return self._rollout_seconds / max(self.end - self.start, 1e-9)

    def look(self, ledger: LedgerView, reason: CapacityReason) -> bool:
        """Note how things stand now; return whether the last batch is trained."""
        if self.end is not None:
            return True
        now = asyncio.get_running_loop().time()
        self._change(now, reason, trainer_waits_for(ledger, self._limits).partition(" (")[0], ledger.rollouts_in_flight)
        ready = len(ledger.ready)
        if self._window.progress is not None and ledger.trained != self._trained:
            self._trained = ledger.trained
            self._window.progress(ledger.trained)
        if self.start is None and ledger.trained >= self._window.warm_up:
            self.start, self.at_start = now, self._count()
            self._rollout_seconds, self.in_flight_max, self.ready_groups_max = 0.0, self._in_flight, ready
        self.in_flight_max = max(self.in_flight_max, self._in_flight)
        self.ready_groups_max = max(self.ready_groups_max, ready)
        if ledger.trained < self._window.batches:
            return False
        self.end, self.at_end = now, self._count()
        return True

    def down(self) -> None:
        """Note that nobody admits, forms or counts anything until the run is taken up."""
        self._change(asyncio.get_running_loop().time(), DOWN, DOWN, 0)

    def _change(self, now: float, reason: str, waits_for: str, in_flight: int) -> None:
        self._rollout_seconds += self._in_flight * (now - self._since)
        self._since, self._in_flight = now, in_flight
        for noted, what in ((self.gate, reason), (self.waits, waits_for)):
            if not noted or noted[-1][1] != what:
                noted.append((now, what))
