"""Plays a whole run on virtual time: the orchestrator that ships, joined to a simulated world.

`simulate(WorldSettings(...), RolloutSection(...), RunSection(...))` is all that is needed. The same settings give the same history, event
for event; `interleaving` plays another order of what happens at one instant; `kills` end the process, and it is taken up again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from math import inf, nextafter

from headway.errors import first_cause
from headway.flow.take_up import Resumption, read_history, take_up
from headway.orchestrator import Orchestrator, Parts, Sections
from headway.protocols import Journal, PromptSource
from headway.rules.admission import limits_of
from headway.rules.lineage import line_of
from headway.settings import (
    DebugSection,
    EngineSection,
    EnvironmentSection,
    EvalSection,
    MetricsSection,
    RolloutSection,
    RunSection,
    TrainerSection,
)
from headway.sim.garbage import collected_seldom
from headway.sim.journal import SimJournal
from headway.sim.loop import run as run_on_virtual_time
from headway.sim.observer import Counters, Observer, Window
from headway.sim.prompts import ListPrompts, RecordingExporter
from headway.sim.result import SimResult
from headway.sim.roster import SimRoster
from headway.sim.settings import WorldSettings
from headway.sim.store import SimBatchStore
from headway.sim.worker import SimWorker
from headway.sim.world import LINEAGE, Kill, Life, World
from headway.types import Checkpoint, Prompt

__all__ = ["SimResult", "WorldSettings", "simulate"]

_METRICS = MetricsSection(interval_seconds=10.0)
_OF_AN_ENGINE = ("name", "url", "kind")  # asked for with each rollout
_DEBUG, _ENGINE, _TRAINER = DebugSection(), EngineSection(), TrainerSection()


def simulate(
    world: WorldSettings,
    rollout: RolloutSection,
    run: RunSection,
    *,
    evaluation: EvalSection | None = None,
    metrics: MetricsSection = _METRICS,
    debug: DebugSection = _DEBUG,
    engine: EngineSection = _ENGINE,
    trainer: TrainerSection = _TRAINER,
    journal: SimJournal | None = None,
    kills: Sequence[Kill] = (),
    drain_at: float = inf,
    drain_code: int = 0,
    interleaving: int | None = None,
    limit_seconds: float = 1e7,
    window: Window | None = None,
) -> SimResult:
    """Play a run to its end and return how it went; raises what the run ends with, out of its exception groups.

    `journal`: where the history goes (kept by the caller when the run fails); `kills`: how its lives end, one after the other, but for the
    last; `drain_at`: when somebody asks for the end (an interruption, with a `drain_code` other than 0); `limit_seconds`: when `NoEnd` is
    raised. `window`: have the run observed, and end it in the instant in which the window's last batch is trained, as it stands then.
    """
    history = SimJournal(keep_rollouts=bool(kills), commit_seconds=world.commit_seconds) if journal is None else journal
    sections = Sections(
        run=run,
        rollout=rollout,
        environment=EnvironmentSection(
            entry="headway.sim:world",
            score="headway.sim:score" if world.rollouts.scored_apart else "",
            score_concurrency=world.score_concurrency,
        ),
        evaluation=evaluation,
        metrics=metrics,
        debug=debug,
        engine=engine,
        trainer=trainer,
    )
    play = _Play(world, sections, history, (drain_at, drain_code), window).to_the_end(kills)
    try:
        with collected_seldom():
            return run_on_virtual_time(play, seed=interleaving, limit_seconds=limit_seconds)
    except BaseExceptionGroup as group:
        raise first_cause(group) from group


class _Play:
    """A run in its world, over all its lives."""

    def __init__(
        self,
        settings: WorldSettings,
        sections: Sections,
        journal: SimJournal,
        drain: tuple[float, int],
        window: Window | None,
    ) -> None:
        self._settings = settings
        self._sections = sections
        self._limits = limits_of(sections.rollout, sections.run.steps)
        self._journal = journal
        self._drain_at, self._drain_code = drain
        self._recorded = RecordingExporter(settings.keep_batches)
        self._workers: list[SimWorker] = []
        self._orchestrator: Orchestrator | None = None  # of the latest life that came to have one
        self._lives = 0
        self._window = window
        self._observer: Observer | None = None

    async def to_the_end(self, kills: Sequence[Kill]) -> SimResult:
        """Start the run, and take it up again after each kill."""
        settings = self._settings
        store = SimBatchStore(lineage=LINEAGE, write_seconds=settings.write_seconds, keep=settings.keep_batches)
        world = World(settings.engines, settings.trainer, store=store, seed=settings.seed, version=settings.version)
        version = settings.version or None
        if self._window is not None:
            self._observer = Observer(self._limits, self._window, count=partial(self._count, world))
        reason: str | None = None
        for kill in [*kills, None]:
            life = Life(kill)
            self._lives += 1
            reason = await life.spend(self._live(world, life, version))
            if reason is not None or kill is None or self._is_over:
                break
            if self._observer is not None:
                self._observer.down()
            world.strike(kill)
            await asyncio.sleep(kill.down_seconds)
            version = world.wake(kill)
        return self._result(world, reason or "")

    async def _live(self, world: World, life: Life, version: int | None) -> str:
        """Be the orchestrator's process; return why the run ended. `version`: the newest that there is, if the run is taken up."""
        settings, loop = self._settings, asyncio.get_running_loop()
        worker = SimWorker(settings.rollouts, world.engines, seed=settings.seed)
        self._workers.append(worker)
        journal = life.journal(self._journal)
        prompts = ListPrompts(
            settings.prompts, epochs=settings.epochs, seed=self._sections.run.seed, fails_after=settings.prompts_fail_after
        )

        roster = SimRoster(world.engines)
        resumption = await self._taken_up(world, version, life, journal, prompts) if version is not None else None

        async def ask_to_drain() -> None:
            await asyncio.sleep(self._drain_at - loop.time())
            orchestrator.drain("asked to", self._drain_code)

        async def observe() -> None:
            assert self._observer is not None  # noqa: S101  the service is there where he is
            await orchestrator.follow(self._observer.look)
            await asyncio.sleep(nextafter(loop.time(), inf) - loop.time())  # until nothing is left to do in this instant
            worker.stop()
            life.end()

        services = [ask_to_drain] if self._drain_at < inf else []
        parts = Parts(
            prompts=prompts,
            worker=worker,
            engines=[life.hold(engine, *_OF_AN_ENGINE) for engine in world.engines if engine.named is None],
            roster=roster if any(engine.named is not None for engine in world.engines) else None,
            make_engine=lambda name, address: life.hold(roster.client(name, address), *_OF_AN_ENGINE),
            trainer=life.hold(world.trainer),
            store=life.hold(world.store),
            journal=journal,
            exporters=[life.hold(self._recorded)],
            first=Checkpoint(version or 0, world.labels[version or 0], f"sim://{version or 0}"),
            advantages=settings.advantages,
            keep=settings.keep,
            eval_prompts=[Prompt(f"eval-{number}", 0, {"number": number}) for number in range(settings.eval_prompts)],
            services=[*services, observe] if self._observer is not None else services,
            resumed=resumption,
            replayed=settings.replayed(resumption.replayed if resumption else {}) if settings.replayed else None,
            clock=loop.time,
        )
        orchestrator = Orchestrator(parts, self._sections)
        self._orchestrator = orchestrator
        return await orchestrator.run()

    async def _taken_up(self, world: World, version: int, life: Life, journal: Journal, prompts: PromptSource) -> Resumption:
        """Take the run up at a version, with what is durable in the journal and whole in the store."""
        history = await read_history(journal, lineage=LINEAGE)
        if version < history.ledger.trained:
            world.fork(version)
        store = world.store
        resumption = await take_up(
            journal,
            history,
            version=version,
            line=line_of(world.lineage, world.parents),
            limits=self._limits,
            prompts=prompts,
            stored=store.stored,
            advantages=self._settings.advantages,
            clock=asyncio.get_running_loop().time,
            trained_at=world.completed.get,
        )
        again = {k for k, _ in resumption.shipped_again}
        life.hold(store).remove([k for k in store.batches if k >= version and k not in again])
        return resumption

    @property
    def _is_over(self) -> bool:
        return self._observer is not None and self._observer.end is not None

    @staticmethod
    def _count(world: World) -> Counters:
        generations = {engine.name: engine.generation for engine in world.engines}
        return Counters(
            sampled=world.sampled,
            preemptions=sum(generation.preemptions for generation in generations.values()),
            sequences={name: generation.sequence_seconds for name, generation in generations.items()},
        )

    def _result(self, world: World, reason: str) -> SimResult:
        now = asyncio.get_running_loop().time()
        world.note_versions()
        assert self._orchestrator is not None  # noqa: S101  a run that has ended had one
        return SimResult(
            reason=reason,
            seconds=now,
            events=self._journal.events,
            batches=world.store.batches,
            rows=self._recorded.rows,
            ledger=self._orchestrator.ledger,
            attempts=sum(worker.attempts for worker in self._workers),
            peak=max(worker.peak for worker in self._workers),
            trainer_share=world.busy_seconds / max(now, 1e-9),
            sampled_tokens=world.sampled,
            lives=self._lives,
            world=world,
            workers=self._workers,
            observed=self._observer,
        )
