"""The components of a run, joined: each with the channel ends and callables that it takes, and with nothing else.

    PromptFeed -> Dispatcher -> (Scorer) -> TrainSink -> Shipper -> trainer -> WeightWatcher -> engines
                  (CapacityGate, RolloutRunner)   |                        |
    Recorder: ledger and journal                Ingest                     +-> MetricsLoop, CoverageGuard        EvalSink, Pacer beside

A wiring diagram and no behaviour: what runs when is the orchestrator's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from headway.flow.channels import Channel
from headway.flow.coverage_guard import CoverageGuard
from headway.flow.dispatcher import Dispatcher
from headway.flow.eval_sink import EvalSink
from headway.flow.failed_groups import FailedGroups
from headway.flow.fleet import Fleet
from headway.flow.gate import CapacityGate
from headway.flow.ingest import Ingest
from headway.flow.keeper import Keeper
from headway.flow.metrics_loop import MetricsLoop
from headway.flow.pacer import Pacer
from headway.flow.payloads import Payloads
from headway.flow.prompt_feed import PromptFeed
from headway.flow.recorder import Recorder
from headway.flow.runner import RolloutRunner
from headway.flow.scorer import Scorer
from headway.flow.shipper import Shipper
from headway.flow.sink_policy import SinkPolicy
from headway.flow.take_up import Resumption
from headway.flow.train_sink import TrainSink
from headway.flow.watchdog import Pulse, Watchdog
from headway.parts import Parts, Sections, Service
from headway.rules.admission import limits_of
from headway.rules.batching import DYNAMIC_SAMPLING_LIMIT
from headway.rules.ledger import Ledger
from headway.rules.stall import Scene
from headway.settings import EvalSection, RolloutSection
from headway.types import Batch, FinishedGroup, SamplingParams

_log = logging.getLogger("headway")

_NO_RESTARTS = {"engine_restarts": 0, "trainer_restarts": 0, "worker_restarts": 0}
Rows = Channel[tuple[int, Mapping[str, Any]]]


class Components:
    """Everything that runs in a run, made of its parts and its config."""

    def __init__(self, parts: Parts, sections: Sections) -> None:
        self._parts = parts
        self._sections = sections
        run, rollout, environment = sections.run, sections.rollout, sections.environment
        self._handed_over = 0
        self.limits = limits_of(rollout, run.steps)
        self._resumed = resumed = parts.resumed or Resumption(ledger=Ledger())
        self.pulse = Pulse()
        self.recorder = Recorder(parts.journal, ledger=resumed.ledger, heed=self.pulse.heed)
        self.watch = self.recorder.watch
        self.gate = CapacityGate(self.limits, watch=self.watch, record=self.recorder.record, clock=parts.clock)
        self.fleet = self._new_fleet()
        self.runner = self._new_runner()
        self.finished: Channel[FinishedGroup] = Channel(2 * self.limits.groups_per_batch)
        self.batches: Channel[Batch] = Channel(1)
        rows: Rows = Channel(rollout.max_lead + 2)
        self.payloads = Payloads(
            commit=self.recorder.commit,
            read=parts.journal.read,
            watch=self.watch,
            max_held_bytes=rollout.max_held_bytes,
            clock=parts.clock,
        )
        self.feed = self._new_feed()
        self.failed = self._new_failed()
        self.scorer = self._new_scorer() if environment.score else None
        self.dispatcher = self._new_dispatcher()
        self.sink = self._new_sink()
        self.shipper = Shipper(
            batches=self.batches,
            rows=rows,
            write=self.pulse.around("batch writing", parts.store.write),
            submit=self.pulse.around("batch writing", self._submit),
            shipped_again=resumed.shipped_again,
        )
        self.keeper = self._new_keeper()
        self.guard = CoverageGuard(watch=self.watch, rollout=rollout, max_uncovered_batches=run.max_uncovered_batches)
        self.watchdog = self._new_watchdog()
        self.metrics = self._new_metrics(rows)
        self.evals = self._new_evals(sections.evaluation) if sections.evaluation else None
        self.ingest = self._new_ingest()
        self.pacer = self._new_pacer() if rollout.steps_ahead == "auto" else None
        if rollout.on_stale == "train":
            _log.warning('rollout.on_stale = "train": there is no bound on staleness; metrics tell the share over max_staleness')

    def _new_fleet(self) -> Fleet:
        sections = self._sections
        return Fleet(
            self._parts.engines,
            roster=self._parts.roster,
            make_engine=self._parts.make_engine,
            trainer=self._parts.trainer,
            watch=self.watch,
            record=self.recorder.record,
            clock=self._parts.clock,
            settings=sections.engine,
            evaluation=sections.evaluation,
            steps=sections.run.steps,
            publish_lag=sections.debug.publish_lag,
            publish_every=sections.trainer.publish_every,
        )

    def _new_runner(self) -> RolloutRunner:
        run, rollout, engine = self._sections.run, self._sections.rollout, self._sections.engine
        return RolloutRunner(
            attempt=self._parts.worker.attempt,
            pool=self.fleet.pool,
            lost_since=self.fleet.probe.lost_since,
            sampling=_sampling(rollout, rollout.temperature),
            run_seed=run.seed,
            max_rollout_tokens=rollout.max_rollout_tokens,
            timeout_seconds=rollout.timeout_seconds,
            max_attempts=rollout.max_attempts,
            max_consecutive_failures=run.max_consecutive_failures,
            on_lost=engine.on_lost,
            lora=engine.weight_transfer == "lora",
        )

    def _new_feed(self) -> PromptFeed:
        return PromptFeed(
            self._parts.prompts,
            watch=self.watch,
            record=self.recorder.record,
            clock=self._parts.clock,
            position=None if self._parts.resumed is None else self._parts.resumed.position,
        )

    def _new_failed(self) -> FailedGroups:
        return FailedGroups(
            watch=self.watch,
            record=self.recorder.record,
            requeue=self.feed.requeue,
            max_prompt_failures=self._sections.rollout.max_prompt_failures,
            clock=self._parts.clock,
        )

    def _new_dispatcher(self) -> Dispatcher:
        return Dispatcher(
            prompts=self.feed,
            admit=self.gate.admit,
            run_rollout=self.runner.run,
            record=self.recorder.record,
            commit=self.payloads.commit,
            finished=self.finished,
            drop_failed=self.failed.drop,
            whole_groups_only=self._whole_groups_only,
            max_concurrent=self._sections.rollout.max_concurrent,
            clock=self._parts.clock,
            continued=self._resumed.continued,
            unscored=self._resumed.unscored,
        )

    def _new_scorer(self) -> Scorer:
        environment = self._sections.environment
        return Scorer(
            finished=self.finished,
            score=self.pulse.around("scorer", self._parts.worker.score),
            scope=environment.score_scope,
            concurrency=environment.score_concurrency,
            timeout_seconds=environment.score_timeout_seconds,
            load=self.payloads.load,
            record=self.recorder.record,
            clock=self._parts.clock,
            is_live=lambda group: group in self.watch.now.running,
        )

    def _new_sink(self) -> TrainSink:
        rollout = self._sections.rollout
        return TrainSink(
            groups=self.finished if self.scorer is None else self.scorer.scored,
            batches=self.batches,
            watch=self.watch,
            record=self.recorder.record,
            flush=self.recorder.flush,
            requeue=self.feed.requeue,
            cancel=self.dispatcher.cancel,
            drop_failed=self.failed.drop,
            load=self.payloads.load_groups,
            limits=self.limits,
            policy=SinkPolicy(
                temperature=rollout.temperature,
                whole_groups_only=self._whole_groups_only,
                overlong=rollout.overlong,
                most_replaced=DYNAMIC_SAMPLING_LIMIT * rollout.groups_per_batch if rollout.dynamic_sampling else 0,
                scored_apart=bool(self._sections.environment.score),
            ),
            advantages=self._parts.advantages,
            keep=self._parts.keep,
            clock=self._parts.clock,
            ready=self._resumed.ready,
        )

    def _new_keeper(self) -> Keeper:
        run = self._sections.run
        return Keeper(
            watch=self.watch,
            prune=self._parts.journal.prune,
            retire=self._parts.retire_batches,
            flush=self.recorder.flush,
            free_space=self._parts.free_space,
            heed_space=self.gate.heed_space,
            keep_payloads=run.keep_payloads,
            keep_batches=run.keep_batches,
            min_free_bytes=run.min_free_bytes,
        )

    def _new_watchdog(self) -> Watchdog:
        run = self._sections.run
        return Watchdog(
            pulse=self.pulse,
            watch=self.watch,
            limits=self.limits,
            look=self._scene,
            stall_seconds=run.stall_seconds,
            exit_on_stall=run.on_stall == "exit",
        )

    def _new_metrics(self, rows: Rows) -> MetricsLoop:
        return MetricsLoop(
            rows=rows,
            watch=self.watch,
            trainer_metrics=self._parts.trainer.metrics,
            snapshots=self._snapshot,
            export=self._export,
            limits=self.limits,
            steps=self._sections.run.steps,
            interval_seconds=self._sections.metrics.interval_seconds,
            clock=self._parts.clock,
            sampled_tokens=self.fleet.counts.total,
            heed=self.guard.heed,
            loop_lag=self._parts.loop_lag,
        )

    def _new_evals(self, evaluation: EvalSection) -> EvalSink:
        rollout = self._sections.rollout
        temperature = rollout.temperature if evaluation.temperature is None else evaluation.temperature
        return EvalSink(
            settings=evaluation,
            prompts=self._parts.eval_prompts,
            sampling=_sampling(rollout, temperature),
            watch=self.watch,
            record=self.recorder.record,
            admit=self.gate.admit_eval,
            release=self.gate.release_eval,
            run_rollout=self.pulse.around("evaluation", self.runner.run, moves=True),
            score=self.scorer.score if self.scorer else None,
            export=self._export,
            clock=self._parts.clock,
        )

    def _new_ingest(self) -> Ingest | None:
        if self._parts.replayed is None and self._parts.listen is None:
            return None
        return Ingest(
            place=self.gate.admit_replayed,
            commit=self.payloads.commit,
            take=self.sink.take_ingested,
            watch=self.watch,
            replayed=self._parts.replayed,
            replayed_at_once=self.limits.replayed_groups,
        )

    def _new_pacer(self) -> Pacer:
        return Pacer(self.limits, watch=self.watch, record=self.recorder.record, clock=self._parts.clock)

    @property
    def _whole_groups_only(self) -> bool:
        """Whether a group that lost a member is of no use."""
        environment = self._sections.environment
        return self._sections.rollout.incomplete == "drop" or (bool(environment.score) and environment.score_scope == "group")

    @property
    def path(self) -> list[Service]:
        """What prompts pass through on their way to the trainer; each ends when its input does."""
        stages: list[Service] = [self.dispatcher.run, self.sink.run, self.shipper.run, self.metrics.run_rows]
        return stages if self.scorer is None else [*stages, self.scorer.run]

    @property
    def supervision(self) -> list[Service]:
        """What keeps engines and trainer alive, from before the first weights are brought."""
        return [make(self.fleet.pool) for make in self._parts.supervise]

    @property
    def beside(self) -> list[Service]:
        """What runs beside the path until the end."""
        services: list[Service] = [self.feed.run, self.runner.sweep, *self.fleet.services, self.metrics.run]
        services += [self.keeper.run, self.keeper.watch_space]
        services += self._parts.services
        if self.pacer is not None:
            services.append(self.pacer.run)
        if self.ingest is not None:
            services.append(self.ingest.run)
            if self._parts.listen is not None:
                services.append(self._parts.listen(self.ingest))
        return services

    def _snapshot(self) -> Mapping[str, Any]:
        return {
            "capacity": self.gate.capacity,
            "capacity_reason": self.gate.reason,
            "eval_in_flight": self.gate.eval_in_flight,
            "finished_queue": len(self.finished),
            "batch_queue": len(self.batches),
            "parked_seconds": self.sink.parked_seconds,
            "free_bytes": self.keeper.free_bytes,
            **self.fleet.snapshot(),
            **_NO_RESTARTS,
            **self._parts.restarts(),
            **self.watchdog.snapshot(),
            **({} if self.ingest is None else self.ingest.counts),
        }

    async def _submit(self, k: int) -> None:
        await self._parts.trainer.submit(k)
        self._handed_over = k + 1

    def _scene(self, idle_seconds: float, late_seconds: float) -> Scene:
        since, now = self.recorder.writing_since, asyncio.get_running_loop().time()
        return Scene(
            idle_seconds=idle_seconds,
            late_seconds=late_seconds,
            journal_seconds=0.0 if since is None else now - since,
            writing_seconds=self.pulse.seconds("batch writing"),
            scoring_seconds=self.pulse.seconds("scorer"),
            syncing=self.fleet.watcher.syncing,
            scored_apart=self.scorer is not None,
            handed_over=self._handed_over,
            publish_lag=self._sections.debug.publish_lag,
            publish_every=self._sections.trainer.publish_every,
            eval_in_flight=self.gate.eval_in_flight,
            finished_queue=len(self.finished),
            batch_queue=len(self.batches),
            capacity=self.gate.capacity,
            capacity_reason=self.gate.reason,
            engines=self.pulse.engines,
            last_event=f"{self.pulse.last} {idle_seconds:.0f} s ago",
        )

    def _export(self, stream: str, row: Mapping[str, Any]) -> None:
        for exporter in self._parts.exporters:
            exporter.export(stream, row)


def _sampling(rollout: RolloutSection, temperature: float) -> SamplingParams:
    return SamplingParams(temperature, rollout.top_p, rollout.top_k, rollout.max_tokens)
