"""Rolling syncs and rarer ones: one engine after the other, the version is the oldest that is served, and the last is always served."""

import asyncio

from doubles import beside, checkpoint, turns
from weights_stage import Stage, slow

from headway.errors import EngineFailed
from headway.events import EngineState, Published
from headway.sim.engine import EngineSettings


def published(stage):
    return [(event.time, event.version) for event in stage.spine.of(Published)]


async def test_one_engine_after_the_other_takes_new_weights_and_the_last_publishes_them():
    stage = Stage(slow(2.0), slow(5.0), slow(3.0), rolling=True)
    async with beside(*await stage.begun()):
        stage.trainer.publish(1)
        seen = []
        for _ in range(11):
            await asyncio.sleep(1.0)
            seen.append(([engine.paused for engine in stage.engines].count(True), stage.pool.version, stage.spine.ledger.version))
    assert all(paused <= 1 for paused, _, _ in seen)
    assert [version for _, version, _ in seen[:9]] == [0] * 9
    assert seen[-1] == (0, 1, 1)
    assert [(event.engine, event.time) for event in stage.spine.of(EngineState)] == [("e0", 2.0), ("e1", 7.0), ("e2", 10.0)]
    assert published(stage) == [(10.0, 1)]


async def test_rollouts_go_to_those_that_generate_while_one_is_synced():
    stage = Stage(slow(4.0), slow(4.0), rolling=True)
    async with beside(*await stage.begun()):
        stage.trainer.publish(1)
        await asyncio.sleep(1.0)
        assert [(await stage.pool.acquire()).name for _ in range(3)] == ["e1"] * 3
        await asyncio.sleep(4.0)
        assert [(await stage.pool.acquire()).name for _ in range(3)] == ["e0"] * 3


async def test_versions_that_come_during_a_roll_are_skipped_but_for_the_newest():
    stage = Stage(slow(4.0), slow(4.0), rolling=True)
    async with beside(*await stage.begun()):
        for version in (1, 2, 3):
            stage.trainer.publish(version)
            await asyncio.sleep(2.0)
        await asyncio.sleep(20.0)
    assert published(stage) == [(8.0, 1), (16.0, 3)]


async def test_an_engine_that_fails_in_a_roll_is_lost_and_the_roll_goes_on():
    stage = Stage(slow(4.0), EngineSettings(transfer_seconds=4.0, dies_at=6.0), slow(4.0), rolling=True)
    async with beside(*await stage.begun()):
        stage.trainer.publish(1)
        await asyncio.sleep(13.0)
        assert stage.pool.states == {"e0": "serving line-1", "e1": "lost", "e2": "serving line-1"}
        assert not any(engine.paused for engine in stage.engines)
    assert published(stage) == [(12.0, 1)]


async def test_an_engine_that_comes_back_during_a_roll_gets_its_weights_at_once_and_not_twice():
    stage = Stage(slow(8.0), EngineSettings(transfer_seconds=1.0, dies_at=1.0, back_at=2.0), slow(8.0), rolling=True)
    async with beside(*await stage.begun()):
        stage.trainer.publish(1)
        await asyncio.sleep(1.5)
        stage.pool.lost("e1", EngineFailed("it died"))
        await asyncio.sleep(5.5)
        assert stage.pool.states["e1"] == "serving line-1"
        await asyncio.sleep(15.0)
    assert [event.label for event in stage.spine.of(EngineState) if (event.engine, event.state) == ("e1", "serving")] == ["line-1"]
    assert published(stage) == [(16.0, 1)]


async def test_every_third_version_is_served_and_the_last_when_the_run_drains():
    stage = Stage(publish_every=3)
    async with beside(*await stage.begun()):
        for version in range(1, 9):
            stage.trainer.publish(version)
            await turns()
        assert [version for _, version in published(stage)] == [3, 6]
        stage.spine.drain()
        await turns()
        assert published(stage)[-1][1] == 8
        stage.trainer.publish(9)
        stage.trainer.publish(10)
        await turns()
    assert [version for _, version in published(stage)] == [3, 6, 8, 10]
    assert stage.spine.ledger.trained == 10


async def test_where_the_nth_version_was_overtaken_the_first_after_it_is_served():
    stage = Stage(publish_every=3)
    async with beside(*await stage.begun()):
        for version in (2, 4, 5, 6, 8, 10):
            stage.trainer.publish(version)
            await turns()
    assert [version for _, version in published(stage)] == [4, 6, 10]


async def test_a_version_between_that_comes_while_the_nth_is_loaded_is_not_served():
    stage = Stage(slow(5.0), publish_every=2)
    async with beside(*await stage.begun()):
        for version in (1, 2, 3):
            stage.trainer.publish(version)
            await asyncio.sleep(1.0)
        await asyncio.sleep(20.0)
        assert [version for _, version in published(stage)] == [2]
        stage.trainer.publish(4)
        await asyncio.sleep(6.0)
    assert [version for _, version in published(stage)] == [2, 4]


async def test_the_last_step_is_served_whatever_its_number():
    stage = Stage(publish_every=4, steps=6)
    async with beside(*await stage.begun()):
        stage.trainer.publish(6)
        await turns()
        stage.spine.drain("all 6 steps are trained")
        await turns()
        assert stage.spine.ledger.version == 6
    assert stage.engines[0].version == checkpoint(6).version
