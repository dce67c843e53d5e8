"""What a simulated run has come to: its history, its batches and rows, and the world that it left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.events import AnyEvent
from headway.rules.view import LedgerView
from headway.sim.observer import Observer
from headway.sim.store import KeptBatch
from headway.sim.worker import SimWorker
from headway.sim.world import World


@dataclass(frozen=True, kw_only=True)
class SimResult:
    """How a run went. `seconds` is virtual; `trainer_share` the part of them in which the trainer trained.

    `sampled_tokens`: what the engines have written in all, whatever became of it. `lives`: how often the run was started or taken up; of
    these, `world` is what they left behind. `workers`: one of each life. `observed`: what was noted beside it, if a window was asked for.
    """

    reason: str
    seconds: float
    events: Sequence[AnyEvent]
    batches: Mapping[int, KeptBatch]
    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    ledger: LedgerView
    attempts: int
    peak: int
    trainer_share: float
    sampled_tokens: int
    lives: int
    world: World
    workers: Sequence[SimWorker]
    observed: Observer | None

    @property
    def max_staleness(self) -> int:
        """The largest staleness of a token that was trained on."""
        return max((batch.max_seen for batch in self.batches.values()), default=0)

    @property
    def masked_share(self) -> float:
        """The share of the tokens in batches that was masked as stale."""
        masked = sum(sum(batch.masked.values()) for batch in self.batches.values())
        trained = sum(sum(batch.tokens.values()) for batch in self.batches.values())
        return masked / max(1, masked + trained)
