"""C10: whichever stage stands still, the watchdog names it within the limit; whoever waits because it was told to is not called stalled."""

import asyncio
import logging
import threading
from math import inf
from typing import Any

import pytest

from headway.adapters.exporters.behind import BehindExporter
from headway.errors import Stalled, first_cause
from headway.orchestrator import Orchestrator, Parts, Sections
from headway.protocols import Exporter
from headway.rules.advantages import grpo
from headway.settings import EnvironmentSection, EvalSection, MetricsSection, RolloutSection, RunSection
from headway.sim.distributions import Fixed
from headway.sim.engine import EngineSettings, SimEngine
from headway.sim.journal import SimJournal
from headway.sim.loop import run as run_on_virtual_time
from headway.sim.prompts import ListPrompts, RecordingExporter
from headway.sim.store import SimBatchStore
from headway.sim.trainer import SimTrainer, TrainerSettings
from headway.sim.worker import Fault, RolloutSettings, SimWorker
from headway.types import Checkpoint, Prompt

LIMIT = 60.0
STALLS_AT = 30.0


async def for_ever():
    await asyncio.get_running_loop().create_future()


class FewPrompts(ListPrompts):
    """Gives ten prompts, and then no further one and no end either."""

    async def __aiter__(self):
        given = super().__aiter__()
        for _ in range(10):
            yield await anext(given)
        await for_ever()


class StuckJournal(SimJournal):
    async def append(self, entries):
        if asyncio.get_running_loop().time() > STALLS_AT:
            await for_ever()
        return await super().append(entries)


class UnreadableJournal(SimJournal):
    async def read(self, reference):
        if asyncio.get_running_loop().time() > STALLS_AT:
            await for_ever()
        return await super().read(reference)


class StuckStore(SimBatchStore):
    async def write(self, batch):
        if asyncio.get_running_loop().time() > STALLS_AT:
            await for_ever()
        return await super().write(batch)


class StuckEngine(SimEngine):
    async def transfer(self, checkpoint):
        if asyncio.get_running_loop().time() > STALLS_AT:
            await for_ever()
        await super().transfer(checkpoint)


class DeafEngine(SimEngine):
    async def prepare(self, checkpoint):
        await for_ever()


class StuckScorer(SimWorker):
    async def score(self, request):
        if asyncio.get_running_loop().time() > STALLS_AT:
            await for_ever()
        return await super().score(request)


class World:
    """A run that does well, but for what a test changes. Fields are parts; `services` are made of the orchestrator."""

    def __init__(self, *, rollouts=None, trainer=None, engine=SimEngine, worker=SimWorker, journal=None, store=None, prompts=None):
        self.engines = [engine("engine-0", EngineSettings()), SimEngine("engine-1", EngineSettings())]
        rollouts = rollouts or RolloutSettings(seconds=Fixed(2.0))
        self.worker = worker(rollouts, self.engines)
        self.scored_apart = rollouts.scored_apart
        self.store = store or SimBatchStore()
        self.trainer = SimTrainer(trainer or TrainerSettings(), self.store.batches, lineage="sim")
        self.journal = journal or SimJournal()
        self.prompts = prompts or ListPrompts(1000)
        self.rows = RecordingExporter()
        self.exporters: list[Exporter] = [self.rows]
        self.seconds = 0.0

    def play(self, *, steps=1000, on_stall="exit", evaluation=None, rollout=None, during=None, **more):
        """Play; raise what the run ends by."""
        run = RunSection(steps=steps, stall_seconds=LIMIT, on_stall=on_stall, drain_timeout_seconds=1e4, **more)

        async def main():
            loop = asyncio.get_running_loop()

            async def meanwhile():
                if during is not None:
                    await during(orchestrator)

            parts = Parts(
                prompts=self.prompts,
                worker=self.worker,
                engines=self.engines,
                trainer=self.trainer,
                store=self.store,
                journal=self.journal,
                exporters=self.exporters,
                first=Checkpoint(0, "sim-0", "sim://0"),
                advantages=grpo,
                eval_prompts=[Prompt(f"eval-{n}", 0, {}) for n in range(4)] if evaluation else (),
                services=[meanwhile],
                clock=loop.time,
            )
            orchestrator = Orchestrator(
                parts,
                Sections(
                    run=run,
                    rollout=rollout
                    or RolloutSection(groups_per_batch=4, group_size=2, max_concurrent=32, timeout_seconds=0, max_staleness=2),
                    environment=EnvironmentSection(entry="a:b", score="a:c" if self.scored_apart else "", score_timeout_seconds=0),
                    evaluation=evaluation,
                    metrics=MetricsSection(interval_seconds=10.0),
                ),
            )
            try:
                return await orchestrator.run()
            finally:
                self.seconds = loop.time()

        try:
            return run_on_virtual_time(main(), limit_seconds=1e5)
        except BaseExceptionGroup as group:
            raise first_cause(group) from None


def hangs_later(prompt, member):
    """Prompts that hang, after some that do not."""
    return Fixed(inf) if prompt.fields["number"] % 5 == 4 else Fixed(2.0)


def hangs_in_evaluation(prompt, member):
    return Fixed(inf) if prompt.id.startswith("eval") else Fixed(2.0)


TIGHT = RolloutSection(groups_per_batch=4, group_size=2, max_concurrent=32, timeout_seconds=0, max_staleness=2, max_held_bytes=1)
PAYLOADS = RolloutSettings(seconds=Fixed(2.0), payload=True)
EVALUATION = EvalSection(every=1000, prompts="a:b")

STALLS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "prompts": (World, {"prompts": FewPrompts(1000)}, {}),
    "environment or engine": (World, {"rollouts": RolloutSettings(seconds=hangs_later)}, {}),
    "scorer": (World, {"rollouts": RolloutSettings(seconds=Fixed(2.0), scored_apart=True), "worker": StuckScorer}, {}),
    "sink": (World, {"rollouts": PAYLOADS, "journal": UnreadableJournal()}, {"rollout": TIGHT}),
    "batch writing": (World, {"store": StuckStore()}, {}),
    "trainer": (World, {"trainer": TrainerSettings(late={7: inf})}, {}),
    "weight sync": (World, {"engine": StuckEngine}, {}),
    "evaluation": (World, {"rollouts": RolloutSettings(seconds=hangs_in_evaluation)}, {"evaluation": EVALUATION, "steps": 10}),
    "journal": (World, {"journal": StuckJournal()}, {}),
}


@pytest.mark.parametrize("stage", STALLS)
def test_C10_a_stage_that_stands_still_is_named_within_the_limit_and_ends_the_run_where_it_is_to(stage, caplog):
    make, world, play = STALLS[stage]
    world = make(**world)
    with pytest.raises(Stalled, match=f"nothing has moved for 60 s; stalled: {stage}: ") as stalled:
        world.play(**play)
    assert stalled.value.exit_code == 3
    text = str(stalled.value)
    for count in ("in flight: ", "queued: ", "ready: ", "capacity: ", "engines: engine-0 serving sim-", "last: ", "the trainer waits for "):
        assert count in text
    assert world.seconds < 300
    assert [row["stalled_stage"] for row in world.rows.rows["pipeline"]][-1] == stage


def test_C10_a_first_version_that_no_engine_takes_is_a_stall_too():
    world = World(engine=DeafEngine)
    world.engines = [DeafEngine("engine-0", EngineSettings(), label="another")]
    with pytest.raises(Stalled, match="stalled: weight sync: version 0 is not served by all engines") as stalled:
        world.play()
    assert world.seconds == LIMIT
    assert "last: the start 60 s ago" in str(stalled.value)


def test_C10_without_the_exit_a_stall_is_reported_again_at_growing_distances_and_the_run_goes_on_when_it_can(caplog):
    caplog.set_level(logging.INFO, logger="headway")
    world = World(trainer=TrainerSettings(late={3: 1000.0}))
    assert world.play(steps=6, on_stall="report") == "all 6 steps are trained"
    told = [record.getMessage() for record in caplog.records if "nothing has moved" in record.getMessage()]
    assert [int(line.split()[4]) for line in told] == [60, 120, 240, 480, 960]
    stages = [row["stalled_stage"] for row in world.rows.rows["pipeline"]]
    assert stages[0] is stages[-1] is None
    assert 90 <= stages.count("trainer") <= 96
    assert max(row["seconds_since_progress"] for row in world.rows.rows["pipeline"]) > 980


def test_a_run_that_somebody_has_paused_waits_and_is_not_called_stalled(caplog):
    caplog.set_level(logging.INFO, logger="headway")

    async def pause(orchestrator):
        await asyncio.sleep(20)
        orchestrator.pause()
        await asyncio.sleep(500)
        orchestrator.resume()
        await for_ever()

    world = World()
    assert world.play(steps=30, during=pause) == "all 30 steps are trained"
    told = [record for record in caplog.records if "nothing has moved" in record.getMessage()]
    assert [record.levelname for record in told] == ["INFO"] * 4
    assert all("the run waits: paused" in record.getMessage() for record in told)
    assert {row["stalled_stage"] for row in world.rows.rows["pipeline"]} == {None}
    assert max(row["seconds_since_progress"] for row in world.rows.rows["pipeline"]) > 400


@pytest.mark.parametrize("stuck_in", ["make", "export"])
def test_K07_a_tracker_that_hangs_when_it_is_made_or_at_a_row_changes_nothing_about_the_run(stuck_in, caplog):
    gate = threading.Event()

    class Tracker:
        def __init__(self):
            if stuck_in == "make":
                gate.wait()

        def export(self, stream, row):
            if row.get("batch") == 3:
                gate.wait()

        def close(self):
            pass

    alone = World()
    alone.play(steps=10)
    world = World()
    tracker = BehindExporter("tracker", Tracker, rows_waiting=4, close_seconds=0.1)
    world.exporters = [world.rows, tracker]
    try:
        assert world.play(steps=10) == "all 10 steps are trained"
        tracker.close()
    finally:
        gate.set()
    assert world.journal.events == alone.journal.events
    assert world.rows.rows == alone.rows.rows
    assert "exporter tracker: it did not close within 0.1 s" in caplog.text
    assert tracker.lost > 0


def test_attempts_that_fail_and_are_tried_again_move_nothing():
    world = World(rollouts=RolloutSettings(seconds=Fixed(2.0), faults=(Fault("environment_error", 1.0),)))
    rollout = RolloutSection(groups_per_batch=4, group_size=2, max_concurrent=8, timeout_seconds=0, max_attempts=100000)
    with pytest.raises(Stalled, match="stalled: environment or engine"):
        world.play(rollout=rollout, max_consecutive_failures=0)
