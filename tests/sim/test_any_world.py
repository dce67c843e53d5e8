"""Whole runs in which a hostile mind found something: each ends, and accounts for all that it took."""

import asyncio
from functools import partial

import pytest
from offered_groups import offered_group

from headway.errors import first_cause
from headway.events import BatchFormed, GroupDropped, Ingested
from headway.orchestrator import Orchestrator, Parts, Sections
from headway.rules.advantages import grpo
from headway.settings import EnvironmentSection, MetricsSection, RolloutSection, RunSection
from headway.sim.distributions import Fixed
from headway.sim.engine import EngineSettings, SimEngine
from headway.sim.journal import SimJournal
from headway.sim.loop import run as run_on_virtual_time
from headway.sim.prompts import ListPrompts, RecordingExporter
from headway.sim.run import WorldSettings, simulate
from headway.sim.store import SimBatchStore
from headway.sim.trainer import SimTrainer, TrainerSettings
from headway.sim.worker import RolloutSettings, SimWorker
from headway.types import Checkpoint


async def _files(n, rewards):
    for number in range(n):
        yield offered_group(f"file {number}", "replay", rewards)


async def _post(ingest):
    async with asyncio.TaskGroup() as tasks:
        for number in range(1000):
            tasks.create_task(ingest.offer(offered_group(f"posted {number}", "external")))
            await asyncio.sleep(0.5)


def _play(*, keep=None, replayed=None, listen=None, seconds=5.0):
    """Four prompts, once; batches of two groups; the trainer takes that many seconds for each."""

    async def main():
        loop = asyncio.get_running_loop()
        engines = [SimEngine("engine-0", EngineSettings())]
        store, journal = SimBatchStore(whole=True), SimJournal()
        parts = Parts(
            prompts=ListPrompts(4, epochs=1),
            worker=SimWorker(RolloutSettings(reward=lambda _, member, __: float(member)), engines),
            engines=engines,
            trainer=SimTrainer(TrainerSettings(seconds=Fixed(seconds)), store.batches, lineage="sim"),
            store=store,
            journal=journal,
            exporters=[RecordingExporter()],
            first=Checkpoint(0, "sim-0", "sim://0"),
            advantages=grpo,
            keep=keep,
            replayed=replayed,
            listen=listen,
            clock=loop.time,
        )
        rollout = RolloutSection(groups_per_batch=2, group_size=2, max_concurrent=64, max_staleness=2, replayed_groups=2)
        sections = Sections(
            run=RunSection(steps=100),
            rollout=rollout,
            environment=EnvironmentSection(entry="sim:world"),
            metrics=MetricsSection(interval_seconds=1.0),
        )
        orchestrator = Orchestrator(parts, sections)
        return await orchestrator.run(), journal.events

    return run_on_virtual_time(main(), limit_seconds=2000.0)


def _assert_all_are_told(events):
    placed = {event.group for event in events if isinstance(event, Ingested)}
    trained = {one for event in events if isinstance(event, BatchFormed) for one in event.groups}
    dropped = {event.group for event in events if isinstance(event, GroupDropped)}
    assert placed
    assert placed <= trained | dropped


def test_who_posts_while_the_last_batch_of_all_is_trained_does_not_hold_the_run_for_ever():
    reason, events = _play(listen=lambda ingest: partial(_post, ingest))
    assert reason == "the prompts are used up"
    _assert_all_are_told(events)


def test_who_goes_on_posting_once_the_prompts_are_used_up_does_not_make_last_batches_one_by_one():
    reason, events = _play(listen=lambda ingest: partial(_post, ingest), seconds=0.1)
    assert reason == "the prompts are used up"
    assert sum(len(event.groups) < 2 for event in events if isinstance(event, BatchFormed)) <= 1


def test_who_goes_on_posting_what_the_filter_refuses_does_not_hold_the_run_for_ever():
    with pytest.raises(ExceptionGroup) as raised:
        _play(keep=lambda _: False, listen=lambda ingest: partial(_post, ingest))
    assert "the prompts are used up and nothing could be trained" in str(first_cause(raised.value))


@pytest.mark.parametrize("rewards", [(0.0, 1.0), (0.0, 0.0)], ids=["that train", "that are all scored alike"])
def test_files_that_outlast_the_prompts_do_not_hold_the_run_for_ever(rewards):
    reason, events = _play(replayed=_files(1000, rewards))
    assert reason == "the prompts are used up"
    _assert_all_are_told(events)


def test_a_few_groups_without_an_advantage_are_no_empty_batches_where_batches_are_sized_by_tokens():
    section = RolloutSection(group_size=2, max_concurrent=64, max_rollout_tokens=2000, batch_tokens=4000)  # Bmin is 1
    result = simulate(WorldSettings(rollouts=RolloutSettings(reward=0.5)), section, RunSection(steps=50))
    assert result.reason == "all 50 steps are trained"


@pytest.mark.parametrize("on_stale", ["mask", "drop"])
def test_enforced_at_the_shipper_a_slow_trainer_does_not_burn_all_prompts_as_stale(on_stale):
    section = RolloutSection(groups_per_batch=4, group_size=2, max_concurrent=64, max_staleness=0, enforce="ship", on_stale=on_stale)
    rollouts = RolloutSettings(seconds=Fixed(0.1), reward=lambda _, member, __: float(member))
    world = WorldSettings(rollouts=rollouts, trainer=TrainerSettings(seconds=Fixed(5.0)), prompts=200, epochs=1)
    assert simulate(world, section, RunSection(steps=20)).reason == "all 20 steps are trained"
