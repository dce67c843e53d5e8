"""Versions: acknowledged when complete, published once all engines serve them, and no engine stays paused."""

import asyncio

import pytest
from doubles import Spine, beside, checkpoint, together, turns
from weights_stage import Stage, slow

from headway.errors import EngineFailed, EngineSilent, EngineUnreachable, StorageError, TrainerFailed
from headway.events import BatchAcknowledged, EngineState, EvalFinished, EvalStarted, Published
from headway.flow.engine_pool import EnginePool
from headway.flow.engine_syncs import EngineSyncs
from headway.settings import EvalSection
from headway.sim.engine import EngineSettings, SimEngine


async def never_answers() -> str:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def test_the_first_version_is_brought_to_engines_that_do_not_serve_it_and_then_published():
    stage = Stage(slow(3.0), slow(5.0), published=False, labels=("default", "line-0"))
    await stage.watcher.start(checkpoint(0))
    assert stage.spine.clock() == 3.0
    assert {event.engine: event.label for event in stage.spine.of(EngineState)} == {"e0": "line-0", "e1": "line-0"}
    assert stage.spine.events[-1] == Published(3.0, 0, ("e0", "e1"))


async def test_a_version_is_published_once_every_engine_serves_it_and_acknowledged_before():
    stage = Stage(slow(2.0), slow(7.0))
    async with beside(stage.watcher.run()):
        stage.trainer.publish(1)
        await turns()
        assert stage.history() == [("published", 0), ("trained", 0)]
        assert stage.watcher.syncing
        await asyncio.sleep(6.9)
        assert stage.spine.ledger.version == 0
        await asyncio.sleep(0.2)
        assert stage.history() == [("published", 0), ("trained", 0), ("published", 1)]
        assert all(event.time == seconds for event, seconds in zip(stage.spine.of(EngineState), (2.0, 7.0), strict=True))
        assert (stage.watcher.syncing, stage.watcher.sync_seconds, stage.watcher.poll_to_serve_seconds) == (False, 7.0, 7.0)
        assert [engine.version for engine in stage.engines] == [1, 1]


async def test_what_a_sync_costs_is_told_summed_over_the_engines():
    stage = Stage(slow(2.0), slow(7.0))
    async with beside(stage.watcher.run()):
        stage.trainer.publish(1)
        await asyncio.sleep(10.0)
    assert [event.sync_engine_seconds for event in stage.spine.of(Published)] == [0.0, 9.0]


async def test_with_a_lag_the_version_so_many_before_the_newest_is_served_and_never_a_newer_one():
    stage = Stage(publish_lag=2)
    await stage.watcher.start(checkpoint(0))
    async with beside(stage.watcher.run()):
        for version in (1, 2, 3, 4, 7):  # at last the trainer jumps: of what was seen, 4 is the newest that lies 2 behind
            stage.trainer.publish(version)
            await asyncio.sleep(1.0)
            served = stage.spine.ledger.version
            assert served == {1: 0, 2: 0, 3: 1, 4: 2, 7: 4}[version] <= max(0, version - 2)
            assert stage.engines[0].version == served
    assert stage.spine.ledger.trained == 7


class SlowToResume(SimEngine):
    async def abandon(self):
        await asyncio.sleep(2.0)
        await super().abandon()


async def test_a_sync_that_is_cancelled_again_while_its_engine_is_told_to_go_on_waits_for_that_all_the_same():
    spine = Spine()
    engine = SlowToResume("e0", slow(5.0), label="line-0")
    pool = EnginePool([engine], record=spine.record, clock=spine.clock, lost_timeout_seconds=60.0)
    pool.serves("e0", checkpoint(0))
    syncs = EngineSyncs(pool)
    syncs.aim(checkpoint(1))
    syncing = asyncio.create_task(syncs.update(engine))
    for _ in range(2):
        await asyncio.sleep(1.0)
        assert engine.paused
        syncing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await syncing
    assert not engine.paused


async def test_versions_that_were_overtaken_during_a_sync_are_skipped_and_all_their_batches_acknowledged():
    stage = Stage(slow(10.0))
    async with beside(stage.watcher.run()):
        for version, start in [(1, 0), (2, 3), (3, 3), (4, 3)]:
            await asyncio.sleep(start)
            stage.trainer.publish(version)
        await asyncio.sleep(30)
    trained = [("trained", k) for k in range(4)]
    assert stage.history() == [("published", 0), *trained, ("published", 1), ("published", 4)]


async def test_a_jump_of_the_trainer_acknowledges_every_batch_behind_it_once():
    stage = Stage()
    async with beside(stage.watcher.run()):
        stage.trainer.publish(3)
        await turns()
        stage.trainer.publish(5)
        await turns()
    assert [event.k for event in stage.spine.of(BatchAcknowledged)] == [0, 1, 2, 3, 4]
    assert [event.version for event in stage.spine.of(Published)] == [0, 3, 5]


async def test_after_the_last_step_the_trainer_is_not_asked_again_and_may_be_gone():
    stage = Stage(steps=2)
    async with beside(stage.watcher.run()):
        stage.trainer.publish(2)
        await turns()
        assert stage.trainer.asked == 1
        assert stage.spine.ledger.version == 2


@pytest.mark.parametrize("stage_of_failure", ["prepare", "transfer", "commit"])
async def test_E02_E07_an_engine_whose_sync_fails_is_lost_and_the_others_are_published_without_it(stage_of_failure):
    failing = EngineSettings(prepare_seconds=1.0, transfer_seconds=1.0, commit_seconds=1.0, fails=frozenset({(stage_of_failure, 1)}))
    stage = Stage(failing, EngineSettings(prepare_seconds=9.0), slow(9.0), EngineSettings(commit_seconds=9.0))
    stage.trainer.publish(1)
    async with beside(stage.watcher.run()):
        await asyncio.sleep(20)
    assert [event.engine for event in stage.spine.of(EngineState) if event.state == "lost"] == ["e0"]
    assert not any(engine.paused for engine in stage.engines)
    assert stage.spine.of(Published)[-1].engines == ("e1", "e2", "e3")
    assert [engine.version for engine in stage.engines] == [0, 1, 1, 1]
    assert not stage.watcher.syncing


async def test_weights_that_cannot_be_read_end_the_run():
    stage = Stage(slow(9.0), slow(9.0))

    async def damaged(checkpoint):
        raise StorageError("weights/00000001 is damaged")

    stage.engines[0].transfer = damaged
    stage.trainer.publish(1)
    with pytest.raises(StorageError, match="damaged"):
        await together(stage.watcher.run())
    assert not any(engine.paused for engine in stage.engines)
    assert len(stage.spine.of(Published)) == 1


async def test_a_sync_that_is_cancelled_leaves_no_engine_paused():
    stage = Stage(slow(9.0), slow(9.0))
    running = asyncio.ensure_future(stage.watcher.run())
    stage.trainer.publish(1)
    await asyncio.sleep(3)
    assert all(engine.paused for engine in stage.engines)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(engine.paused for engine in stage.engines)


async def test_a_first_sync_that_fails_publishes_nothing():
    stage = Stage(EngineSettings(fails=frozenset({("transfer", 0)})), slow(5.0), published=False, labels=("default", "line-0"))
    with pytest.raises(EngineFailed):
        await together(stage.watcher.start(checkpoint(0)))
    assert stage.spine.of(Published) == []
    assert not any(engine.paused for engine in stage.engines)


async def test_a_trainer_that_dies_ends_the_run():
    stage = Stage()

    async def dead(after):
        raise TrainerFailed("the trainer died")

    stage.trainer.checkpoint = dead
    with pytest.raises(TrainerFailed, match="died"):
        await together(stage.watcher.run())


async def test_a_checkpoint_of_a_batch_that_was_never_formed_is_somebody_elses():
    stage = Stage()
    stage.trainer.publish(7, formed=2)
    with pytest.raises(TrainerFailed, match="line-7 claims 7 trained batches, and only 2 were formed"):
        await together(stage.watcher.run())
    assert stage.spine.ledger.trained == 0


EVALUATION = EvalSection(every=1, prompts="p.jsonl", hold_seconds=20.0)


async def test_a_sync_waits_for_a_running_evaluation_and_then_takes_the_newest_version():
    stage = Stage(evaluation=EVALUATION)
    async with beside(stage.watcher.run()):
        stage.spine.record(EvalStarted(0.0, 0, 1))
        stage.trainer.publish(1)
        await asyncio.sleep(5)
        stage.trainer.publish(2)
        await asyncio.sleep(5)
        assert stage.history() == [("published", 0), ("trained", 0), ("trained", 1)]
        stage.spine.record(EvalFinished(0.0, 0, 1, 0, mixed=False))
        await turns()
        assert stage.history()[-1] == ("published", 2)
        assert stage.watcher.poll_to_serve_seconds == 5.0


async def test_a_sync_waits_for_an_evaluation_no_longer_than_its_hold():
    stage = Stage(evaluation=EVALUATION)
    async with beside(stage.watcher.run()):
        stage.spine.record(EvalStarted(0.0, 0, 1))
        stage.trainer.publish(1)
        await asyncio.sleep(19.9)
        assert stage.spine.ledger.version == 0
        await asyncio.sleep(0.2)
        assert stage.spine.ledger.version == 1


async def test_an_engine_that_is_being_started_again_while_the_run_starts_is_waited_for():
    stage = Stage(EngineSettings(dies_at=0.0, back_at=30.0), slow(1.0), published=False, labels=("default", "default"))

    async def somebody():
        with stage.pool.returning("e0"):
            await asyncio.sleep(31)

    async with beside(somebody()):
        await turns()
        await stage.watcher.start(checkpoint(0))
    assert stage.spine.clock() == 32.0
    assert stage.spine.of(Published)[-1].engines == ("e0", "e1")


@pytest.mark.parametrize("up", [20.0, 300.0])
async def test_an_engine_that_is_not_up_yet_when_the_run_starts_is_waited_for_within_its_limit(up):
    stage = Stage(slow(1.0), published=False, labels=("default",), start_timeout_seconds=60.0)
    label = stage.engines[0].label

    async def not_yet():
        if stage.spine.clock() < up:
            raise EngineUnreachable("e0 cannot be reached")
        return await label()

    stage.engines[0].label = not_yet
    if up < 60:
        await stage.watcher.start(checkpoint(0))
        assert stage.spine.clock() == up + 1.0
    else:
        with pytest.raises(EngineUnreachable):
            await together(stage.watcher.start(checkpoint(0)))
        assert 58 < stage.spine.clock() <= 60


async def test_an_engine_that_never_answers_when_the_run_starts_has_the_same_limit():
    stage = Stage(slow(1.0), slow(1.0), published=False, labels=("default", "default"), start_timeout_seconds=5.0)
    stage.engines[0].label = never_answers
    with pytest.raises(EngineFailed, match=r"e0: .* has not answered in time \(engine\.start_timeout_seconds\)"):
        await together(stage.watcher.start(checkpoint(0)))
    assert stage.spine.clock() == 5.0


async def test_an_engine_whose_first_answers_take_too_long_is_asked_again_when_the_run_starts():
    stage = Stage(slow(1.0), published=False, labels=("default",), start_timeout_seconds=60.0)
    label, asked = stage.engines[0].label, []

    async def late():
        asked.append(stage.spine.clock())
        if len(asked) < 3:
            await asyncio.sleep(10.0)
            raise EngineSilent("not answered within 10 s")
        return await label()

    stage.engines[0].label = late
    await stage.watcher.start(checkpoint(0))
    assert (asked[:3], stage.spine.clock()) == ([0.0, 10.0, 20.0], 21.0)


async def test_a_load_at_the_start_of_a_run_may_take_longer_than_an_answer():
    stage = Stage(slow(20.0), published=False, labels=("default",), start_timeout_seconds=5.0)
    await stage.watcher.start(checkpoint(0))
    assert stage.spine.clock() == 20.0


async def test_an_engine_that_hung_and_is_started_again_while_the_run_starts_has_its_limit_from_then_on():
    stage = Stage(slow(1.0), published=False, labels=("default",), start_timeout_seconds=5.0)
    engine, label = stage.engines[0], stage.engines[0].label
    engine.label = never_answers

    async def somebody():
        await asyncio.sleep(4)
        with stage.pool.returning("e0"):
            await asyncio.sleep(60)
            engine.label = label

    async with beside(somebody()):
        await stage.watcher.start(checkpoint(0))
    assert stage.spine.clock() == 66.0  # with the knock and the load


async def test_a_run_does_not_start_without_one_of_its_engines():
    stage = Stage(EngineSettings(dies_at=0.0), slow(1.0), published=False)
    with pytest.raises(EngineFailed, match="e0 died"):
        await together(stage.watcher.start(checkpoint(0)))


@pytest.mark.parametrize("answers_after", [0.0, 5.0])
async def test_an_engine_that_is_lost_amid_a_sync_that_goes_well_is_never_given_that_version_over_a_newer_one(answers_after):
    """Whoever brings it back may get to it only when it has got that version, or the next one, from the sync that went well."""
    spine, engine, loads, labels = Spine(), SimEngine("e0", slow(4.0), label="line-0"), [], []
    pool = EnginePool([engine], record=spine.record, clock=spine.clock, lost_timeout_seconds=60.0)
    pool.serves("e0", checkpoint(0))
    syncs = EngineSyncs(pool)
    transfer, commit, label = engine.transfer, engine.commit, engine.label

    async def loading(version):
        loads.append(version.version)
        return await transfer(version)

    async def labelling(version):
        labels.append(version.version)
        await commit(version)

    async def late():
        engine.label = label
        await asyncio.sleep(answers_after)
        return await label()

    engine.transfer, engine.commit, engine.label = loading, labelling, late
    syncs.aim(checkpoint(1))
    first = asyncio.create_task(syncs.update(engine))
    await asyncio.sleep(1.0)
    pool.lost("e0", EngineUnreachable("cannot be reached"))
    back = asyncio.create_task(syncs.bring(engine))
    await first
    syncs.aim(checkpoint(2))
    await syncs.update(engine)
    await back
    assert (loads, sorted(labels)) == ([1, 2], labels)
    assert (pool.states, await engine.label()) == ({"e0": "serving line-2"}, "line-2")
