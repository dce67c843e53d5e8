"""The orchestrator takes ready parts, joins the channels, runs the tasks, and orders the drain. It decides nothing else.

    PromptFeed -> Dispatcher -> (Scorer) -> TrainSink -> Shipper -> trainer -> WeightWatcher -> engines
                  (CapacityGate, RolloutRunner)          |
    Recorder: ledger and journal                         +-> MetricsLoop        EvalSink beside

A run ends when its steps are trained, its reward is reached, its prompts are used up, or somebody asks (`drain`). Then: no further group is
admitted; rollouts in flight finish and are kept; what is formed is trained and published; the last version is evaluated; all of it within
`drain_timeout_seconds`, but for the clean-up of user code that is cancelled then. An error anywhere cancels everything and travels with its
cause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.errors import EmptyBatches, RunFailed
from headway.events import Draining, Ended
from headway.flow.channels import Channel
from headway.flow.dispatcher import Dispatcher
from headway.flow.eval_sink import EvalSink
from headway.flow.gate import CapacityGate
from headway.flow.ingest import Ingest
from headway.flow.metrics_loop import MetricsLoop
from headway.flow.pacer import Pacer
from headway.flow.prompt_feed import PromptFeed
from headway.flow.recorder import Recorder
from headway.flow.runner import RolloutRunner
from headway.flow.scorer import Scorer
from headway.flow.shipper import Shipper
from headway.flow.train_sink import Advantages, KeepGroup, SinkPolicy, TrainSink
from headway.flow.watcher import WeightWatcher
from headway.formats.offered import OfferedGroup
from headway.protocols import BatchStore, Engine, Exporter, Journal, PromptSource, Trainer, Worker
from headway.rules.admission import limits_of
from headway.rules.scheduling import run_is_complete
from headway.rules.view import LedgerView
from headway.settings import DebugSection, EnvironmentSection, EvalSection, MetricsSection, RolloutSection, RunSection
from headway.types import (
    Batch,
    Checkpoint,
    FinishedGroup,
    Prompt,
    SamplingParams,
)

_log = logging.getLogger("headway")

Service = Callable[[], Awaitable[None]]
Rows = Channel[tuple[int, Mapping[str, Any]]]
NO_DEBUG = DebugSection()
IN_FLIGHT_SHARE = 0.5  # of the drain's time, for rollouts in flight; the rest is for training and evaluating what is formed


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything the orchestrator joins, ready to use.

    `replayed` groups and those that `listen` takes in come from elsewhere. `services` run beside the path; one that raises ends the run.
    """

    prompts: PromptSource
    worker: Worker
    engines: Sequence[Engine]
    trainer: Trainer
    store: BatchStore
    journal: Journal
    exporters: Sequence[Exporter]
    first: Checkpoint
    advantages: Advantages
    keep: KeepGroup | None = None
    eval_prompts: Sequence[Prompt] = ()
    replayed: AsyncIterable[OfferedGroup] | None = None
    listen: Callable[[Ingest], Service] | None = None
    services: Sequence[Service] = ()
    clock: Callable[[], float] = field(default=time.time)


class Orchestrator:
    """One run, from its first admission to its end."""

    def __init__(
        self,
        parts: Parts,
        *,
        run: RunSection,
        rollout: RolloutSection,
        environment: EnvironmentSection,
        evaluation: EvalSection | None,
        metrics: MetricsSection,
        debug: DebugSection = NO_DEBUG,
    ) -> None:
        self._parts = parts
        self._run = run
        self._publish_lag = debug.publish_lag
        self._limits = limits_of(rollout, run.steps)
        self._recorder = Recorder(parts.journal)
        self._watch = self._recorder.watch
        self._gate = CapacityGate(self._limits, watch=self._watch, record=self._recorder.record, clock=parts.clock)
        self._runner = RolloutRunner(
            attempt=parts.worker.attempt,
            engines=[engine.url for engine in parts.engines],
            sampling=_sampling(rollout, rollout.temperature),
            run_seed=run.seed,
            max_rollout_tokens=rollout.max_rollout_tokens,
            timeout_seconds=rollout.timeout_seconds,
            max_attempts=rollout.max_attempts,
            max_consecutive_failures=run.max_consecutive_failures,
        )
        self._finished: Channel[FinishedGroup] = Channel(2 * self._limits.groups_per_batch)
        self._batches: Channel[Batch] = Channel(1)
        rows: Rows = Channel(rollout.max_lead + 2)
        self._feed = PromptFeed(parts.prompts, watch=self._watch, record=self._recorder.record, clock=parts.clock)
        self._scorer = self._new_scorer(environment) if environment.score else None
        self._dispatcher = self._new_dispatcher(rollout, environment)
        self._sink = self._new_sink(rollout, environment)
        self._shipper = Shipper(batches=self._batches, rows=rows, write=parts.store.write, submit=parts.trainer.submit)
        self._watcher = WeightWatcher(
            trainer=parts.trainer,
            engines=parts.engines,
            watch=self._watch,
            record=self._recorder.record,
            evaluation=evaluation,
            steps=run.steps,
            clock=parts.clock,
            publish_lag=debug.publish_lag,
        )
        self._metrics = self._new_metrics(rows, metrics)
        self._evals = self._new_evals(evaluation, rollout) if evaluation else None
        self._ingest = self._new_ingest()
        self._pacer = self._new_pacer() if rollout.steps_ahead == "auto" else None
        if rollout.on_stale == "train":
            _log.warning('rollout.on_stale = "train": there is no bound on staleness; metrics tell the share over max_staleness')
        self._asked_to_drain = ""
        self._drain_deadline = float("inf")

    def _new_dispatcher(self, rollout: RolloutSection, environment: EnvironmentSection) -> Dispatcher:
        return Dispatcher(
            prompts=self._feed,
            admit=self._gate.admit,
            run_rollout=self._runner.run,
            record=self._recorder.record,
            commit=self._recorder.commit,
            finished=self._finished,
            whole_groups_only=_whole_groups_only(rollout, environment),
            clock=self._parts.clock,
        )

    def _new_scorer(self, environment: EnvironmentSection) -> Scorer:
        return Scorer(
            finished=self._finished,
            score=self._parts.worker.score,
            scope=environment.score_scope,
            concurrency=environment.score_concurrency,
            timeout_seconds=environment.score_timeout_seconds,
            record=self._recorder.record,
            clock=self._parts.clock,
        )

    def _new_sink(self, rollout: RolloutSection, environment: EnvironmentSection) -> TrainSink:
        return TrainSink(
            groups=self._finished if self._scorer is None else self._scorer.scored,
            batches=self._batches,
            watch=self._watch,
            record=self._recorder.record,
            flush=self._recorder.flush,
            requeue=self._feed.requeue,
            cancel=self._dispatcher.cancel,
            limits=self._limits,
            policy=SinkPolicy(
                temperature=rollout.temperature,
                whole_groups_only=_whole_groups_only(rollout, environment),
                overlong=rollout.overlong,
                dynamic_sampling=rollout.dynamic_sampling,
                scored_apart=bool(environment.score),
            ),
            advantages=self._parts.advantages,
            keep=self._parts.keep,
            clock=self._parts.clock,
        )

    def _new_metrics(self, rows: Rows, metrics: MetricsSection) -> MetricsLoop:
        return MetricsLoop(
            rows=rows,
            watch=self._watch,
            trainer_metrics=self._parts.trainer.metrics,
            snapshots=self._snapshot,
            export=self._export,
            groups_per_batch=self._limits.groups_per_batch,
            steps=self._run.steps,
            interval_seconds=metrics.interval_seconds,
            clock=self._parts.clock,
        )

    def _new_evals(self, evaluation: EvalSection, rollout: RolloutSection) -> EvalSink:
        temperature = rollout.temperature if evaluation.temperature is None else evaluation.temperature
        return EvalSink(
            settings=evaluation,
            prompts=self._parts.eval_prompts,
            sampling=_sampling(rollout, temperature),
            watch=self._watch,
            record=self._recorder.record,
            admit=self._gate.admit_eval,
            release=self._gate.release_eval,
            run_rollout=self._runner.run,
            score=self._scorer.score if self._scorer else None,
            export=self._export,
            clock=self._parts.clock,
        )

    def _new_ingest(self) -> Ingest | None:
        if self._parts.replayed is None and self._parts.listen is None:
            return None
        return Ingest(
            place=self._gate.admit_replayed,
            commit=self._recorder.commit,
            take=self._sink.take_ingested,
            watch=self._watch,
            clock=self._parts.clock,
            replayed=self._parts.replayed,
        )

    def _new_pacer(self) -> Pacer:
        return Pacer(self._limits, watch=self._watch, record=self._recorder.record, clock=self._parts.clock)

    @property
    def ledger(self) -> LedgerView:
        """The run's state, read only."""
        return self._watch.now

    def pause(self) -> None:
        """Start no further group until `resume`; what is in flight goes on, and training with it."""
        self._gate.pause()

    def resume(self) -> None:
        """Start groups again."""
        self._gate.resume()

    def drain(self, reason: str) -> None:
        """Ask the run to end in order, for this reason; what is in flight finishes first."""
        self._asked_to_drain = self._asked_to_drain or reason
        self._watch.touch()

    async def run(self) -> str:
        """Play the whole run; return why it ended. Raises the tree of `headway.errors`, inside exception groups."""
        try:
            return await self._play()
        finally:
            for exporter in self._parts.exporters:
                exporter.close()

    async def _play(self) -> str:
        async with asyncio.TaskGroup() as outer:
            writer = outer.create_task(self._recorder.run(), name="recorder")
            await self._watcher.start(self._parts.first)
            beside: list[Service] = [
                self._feed.run,
                self._runner.sweep,
                self._watcher.run,
                self._metrics.run,
                self._guard,
                *self._parts.services,
            ]
            if self._pacer is not None:
                beside.append(self._pacer.run)
            if self._ingest is not None:
                beside.append(self._ingest.run)
                if self._parts.listen is not None:
                    beside.append(self._parts.listen(self._ingest))
            background = [outer.create_task(_awaited(service), name=_name(service)) for service in beside]
            evals = outer.create_task(self._evals.run(), name="eval sink") if self._evals else None
            await self._path()
            await self._settle(evals)
            reason = self._watch.now.draining
            self._recorder.record(Ended(self._parts.clock(), 0, reason))
            for task in background:
                task.cancel()
            await asyncio.wait(background)  # the metrics loop's last row comes before the end
            self._recorder.close()
            await writer
        return reason

    async def _path(self) -> None:
        stages: list[Service] = [self._dispatcher.run, self._sink.run, self._shipper.run, self._metrics.run_rows, self._drain_at_the_end]
        if self._scorer is not None:
            stages.append(self._scorer.run)
        async with asyncio.TaskGroup() as path:
            for stage in stages:
                path.create_task(_awaited(stage), name=_name(stage))

    async def _drain_at_the_end(self) -> None:
        """Wait for the end of the run, declare the drain, and bound what is in flight."""
        await self._watch.until(lambda _: bool(self._why_end()))
        loop = asyncio.get_running_loop()
        seconds = self._run.drain_timeout_seconds
        self._drain_deadline = loop.time() + seconds
        self._recorder.record(Draining(self._parts.clock(), self._why_end()))
        try:
            async with asyncio.timeout(seconds * IN_FLIGHT_SHARE):
                await self._watch.until(lambda now: not now.running)
        except TimeoutError:
            self._dispatcher.cancel_all(f"still running {seconds * IN_FLIGHT_SHARE:g} s after the run began to drain")
            if self._scorer is not None:
                self._scorer.cancel_all()
        await self._in_time(lambda now: now.trained == now.next_batch, "the trainer has not finished the last batch")

    def _why_end(self) -> str:
        return self._asked_to_drain or run_is_complete(self._watch.now, self._run.steps, self._run.finish_when)

    async def _settle(self, evals: asyncio.Task[None] | None) -> None:
        """Publish the last version and evaluate it."""
        ledger = self._watch.now
        await self._in_time(lambda now: now.version >= now.trained - self._publish_lag, "an engine does not serve the last version yet")
        if ledger.trained == 0 and not self._asked_to_drain:
            raise EmptyBatches(f"the prompts are used up and nothing could be trained: {_breakdown(ledger)}")
        if evals is None or self._evals is None:
            return
        try:  # everything that matters is durable: an evaluation that does not fit is no failure of the run
            async with asyncio.timeout_at(self._drain_deadline):
                await self._watch.until(lambda now: now.eval_running is None)
                evals.cancel()
                if ledger.last_eval != ledger.version:
                    await self._evals.evaluate()
        except TimeoutError:
            evals.cancel()
            _log.warning("the evaluation of version %d did not fit into run.drain_timeout_seconds and was cancelled", ledger.version)

    async def _in_time(self, condition: Callable[[LedgerView], bool], otherwise: str) -> None:
        try:
            async with asyncio.timeout_at(self._drain_deadline):
                await self._watch.until(condition)
        except TimeoutError:
            raise RunFailed(f"run.drain_timeout_seconds ({self._run.drain_timeout_seconds:g} s) ran out: {otherwise}") from None

    async def _guard(self) -> None:
        """End the run when batch after batch would be empty: a broken environment or reward, not something to wait out."""
        limit = self._limits.groups_per_batch * self._run.max_empty_batches
        await self._watch.until(lambda now: now.barren >= limit)
        raise EmptyBatches(
            f"{limit} groups in a row had nothing to train on (run.max_empty_batches x groups_per_batch): {_breakdown(self._watch.now)}"
        )

    def _snapshot(self) -> Mapping[str, Any]:
        return {
            "capacity": self._gate.capacity,
            "capacity_reason": self._gate.reason,
            "eval_in_flight": self._gate.eval_in_flight,
            "finished_queue": len(self._finished),
            "batch_queue": len(self._batches),
            "parked_seconds": self._sink.parked_seconds,
            "poll_to_serve_seconds": self._watcher.poll_to_serve_seconds,
            "sync_seconds": self._watcher.sync_seconds,
            "syncing": self._watcher.syncing,
            "engine_load": dict(self._runner.load),
            **({} if self._ingest is None else self._ingest.counts),
        }

    def _export(self, stream: str, row: Mapping[str, Any]) -> None:
        for exporter in self._parts.exporters:
            exporter.export(stream, row)


def _sampling(rollout: RolloutSection, temperature: float) -> SamplingParams:
    return SamplingParams(temperature, rollout.top_p, rollout.top_k, rollout.max_tokens)


def _whole_groups_only(rollout: RolloutSection, environment: EnvironmentSection) -> bool:
    return rollout.incomplete == "drop" or (bool(environment.score) and environment.score_scope == "group")


def _breakdown(ledger: LedgerView) -> str:
    counts = [(f"groups dropped as {cause}", count) for cause, count in ledger.dropped.items()]
    counts += [(f"attempts lost by {cause}", count) for cause, count in ledger.lost.items()]
    if ledger.alike:
        counts.append(("groups whose members all scored alike", ledger.alike))
    listed = ", ".join(f"{what} {count}" for what, count in sorted(counts, key=lambda item: -item[1]))
    hint = "look at the reward: does it ever vary within a group?"
    return f"{listed}; the last lost was {ledger.last_loss}" if ledger.lost else f"{listed}: {hint}"


def _name(service: Service) -> str:
    owner = getattr(service, "__self__", None)
    label = getattr(service, "__name__", repr(service))
    return f"{type(owner).__name__}.{label}" if owner is not None else label


async def _awaited(service: Service) -> None:
    await service()
