"""The metrics loop reports, beside the path: one row per interval of the pipeline, one row per trained batch. It decides nothing.

A batch's row joins what the shipper measured with what the trainer measured, so it is written once the trainer has acknowledged the batch;
then `heed` may look at it. A run that is stopped leaves the rows of batches that were shipped as well, without the trainer's figures. What
the engines have sampled is asked before a row of the pipeline is made: nothing that happened by the row's time is missing from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, get_args

from headway.flow.channels import Channel
from headway.flow.watch import Watch
from headway.formats.batch_metrics import joined
from headway.rules.admission import GateLimits
from headway.rules.batching import trainer_waits_for
from headway.types import Cause

_CAUSES: tuple[Cause, ...] = get_args(Cause)  # each in every row: a series without gaps

Snapshot = Callable[[], Mapping[str, Any]]


class MetricsLoop:
    """Exports rows; `snapshots` are read-only looks at the other components, merged into each pipeline row."""

    def __init__(
        self,
        *,
        rows: Channel[tuple[int, Mapping[str, Any]]],
        watch: Watch,
        trainer_metrics: Callable[[int], Awaitable[Mapping[str, Any]]],
        snapshots: Snapshot,
        export: Callable[[str, Mapping[str, Any]], None],
        limits: GateLimits,
        steps: int,
        interval_seconds: float,
        clock: Callable[[], float],
        sampled_tokens: Callable[[], Awaitable[int | None]] | None = None,
        heed: Callable[[Mapping[str, Any]], None] | None = None,
        loop_lag: Callable[[], tuple[float, float]] | None = None,
    ) -> None:
        self._rows = rows
        self._watch = watch
        self._trainer_metrics = trainer_metrics
        self._snapshots = snapshots
        self._export = export
        self._limits = limits
        self._steps = steps
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._sampled_tokens = sampled_tokens
        self._heed = heed
        self._loop_lag = loop_lag
        self._latest: Mapping[str, Any] = {}
        self._counted = (0.0, 0, 0)  # time, sampled tokens, admitted groups at the last row
        self._lag = 0.0

    async def run(self) -> None:
        """Write a pipeline row per interval, until cancelled; a last one on the way out."""
        loop = asyncio.get_running_loop()
        self._counted = (loop.time(), self._watch.now.sampled_tokens, self._watch.now.admitted)
        try:
            while True:
                due = loop.time() + self._interval_seconds
                await asyncio.sleep(self._interval_seconds)
                self._lag = loop.time() - due
                await self._write()
        finally:
            await self._write()

    async def run_rows(self) -> None:
        """Write one row per trained batch, until the end of the input; cancelled, those of the batches that are not trained yet as well."""
        pending: Mapping[str, Any] | None = None
        try:
            async for k, row in self._rows:
                pending = row
                await self._watch.until(lambda now, k=k: now.trained > k)  # type: ignore[misc]
                merged = joined(row, await self._trainer_metrics(k))
                self._latest, pending = merged, None
                self._export("metrics", merged)
                if self._heed is not None:
                    self._heed(row)
        except asyncio.CancelledError:
            if pending is not None:
                self._export("metrics", pending)
            for _, row in self._rows.take_all():
                self._export("metrics", row)
            raise

    async def _write(self) -> None:
        time = self._clock()
        sampled = await self._sampled_tokens() if self._sampled_tokens is not None else None
        self._export("pipeline", self._row(time, sampled))

    def _row(self, time: float, engine_sampled_tokens: int | None) -> dict[str, Any]:
        ledger = self._watch.now
        now = asyncio.get_running_loop().time()
        since, tokens, admitted = self._counted
        seconds = max(now - since, 1e-9)
        self._counted = (now, ledger.sampled_tokens, ledger.admitted)
        p99, longest = (max(0.0, self._lag),) * 2 if self._loop_lag is None else self._loop_lag()
        recent = [reward for _, reward in list(ledger.rewards)[-10:]]
        return {
            "time": time,
            "batch": ledger.trained,
            "steps": self._steps,
            "version": ledger.version,
            "batches_formed": ledger.next_batch,
            "reward_mean": sum(recent) / len(recent) if recent else None,
            "head_staleness_p99": self._latest.get("head_staleness_p99"),
            "head_staleness_max": self._latest.get("head_staleness_max"),
            "trainable_share": self._latest.get("trainable_share"),
            "rollouts_in_flight": ledger.rollouts_in_flight,
            "groups_running": len(ledger.running),
            "groups_ready": len(ledger.ready),
            "groups_admitted": ledger.admitted - admitted,
            "groups_admitted_per_version": ledger.admitted / max(1, ledger.version + 1),
            "tokens_per_second": (ledger.sampled_tokens - tokens) / seconds,
            "trainer_waits_for": trainer_waits_for(ledger, self._limits),
            "dropped": {cause: ledger.dropped.get(cause, 0) for cause in _CAUSES},
            "lost": {cause: ledger.lost.get(cause, 0) for cause in _CAUSES},
            "engine_sampled_tokens": engine_sampled_tokens,
            "loop_lag_seconds": max(0.0, self._lag),
            "loop_lag_p99_seconds": p99,
            "loop_lag_max_seconds": longest,
            **self._snapshots(),
        }
