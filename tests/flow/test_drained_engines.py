"""engine.weight_sync = "wait": an engine is drained before it is given other weights; whoever waits for a place holds none."""

import asyncio

from doubles import beside, turns
from weights_stage import Stage, slow

from headway.errors import EngineFailed
from headway.events import EngineState, Published


def published(stage):
    return [event.version for event in stage.spine.of(Published)]


async def test_a_sync_waits_for_the_last_place_and_takes_the_version_that_is_newest_by_then():
    stage = Stage(slow(2.0), waits=True)
    async with beside(*await stage.begun()):
        place = await stage.pool.acquire()
        stage.trainer.publish(1)
        await turns()
        waiting = asyncio.ensure_future(stage.pool.acquire())
        await asyncio.sleep(100.0)  # longer than the pool does without an engine that serves
        assert stage.pool.states == {"e0": "draining line-0"}
        assert not stage.engines[0].paused
        stage.trainer.publish(2)
        await turns()
        stage.pool.release(place)
        await asyncio.sleep(1.0)
        assert stage.engines[0].paused
        assert not waiting.done()
        assert (await waiting).label == "line-2"
        await asyncio.sleep(5.0)
    assert published(stage) == [2]
    assert [(event.state, event.label) for event in stage.spine.of(EngineState)] == [("draining", "line-0"), ("serving", "line-2")]


async def test_others_take_what_comes_while_one_drains():
    stage = Stage(slow(2.0), slow(2.0), rolling=True, waits=True)
    async with beside(*await stage.begun()):
        place = await stage.pool.acquire()
        assert place.name == "e0"
        stage.trainer.publish(1)
        await turns()
        others = [await stage.pool.acquire() for _ in range(3)]
        assert {other.name for other in others} == {"e1"}
        stage.pool.release(place)
        await asyncio.sleep(3.0)
        assert stage.pool.states == {"e0": "serving line-1", "e1": "draining line-0"}
        for other in others:
            stage.pool.release(other)
        await asyncio.sleep(3.0)
    assert published(stage) == [1]


async def test_an_engine_that_is_lost_as_it_drains_comes_back_only_without_its_rollouts_and_they_go_nowhere_else():
    stage = Stage(slow(2.0), waits=True)
    async with beside(*await stage.begun()):
        place = await stage.pool.acquire()
        told = asyncio.Event()
        place.give_up = told.set
        stage.trainer.publish(1)
        await turns()
        stage.pool.lost("e0", EngineFailed("it died"))
        await told.wait()
        await asyncio.sleep(100.0)
        assert stage.pool.states == {"e0": "lost"}
        assert await stage.pool.acquire_instead(place) is None  # it serves other weights by now
        assert stage.pool.states == {"e0": "serving line-1"}
    assert published(stage) == [1]
    assert stage.pool.load == {"sim://e0": 0}


async def test_a_rollout_moves_to_an_engine_with_the_same_weights():
    stage = Stage(slow(1.0), slow(1.0), slow(1.0), rolling=True, waits=True)
    async with beside(*await stage.begun()):
        places = [await stage.pool.acquire() for _ in range(3)]
        stage.trainer.publish(1)
        await turns()
        stage.pool.release(places[0])
        await asyncio.sleep(1.5)
        assert stage.pool.states == {"e0": "serving line-1", "e1": "draining line-0", "e2": "serving line-0"}
        stage.pool.lost("e1", EngineFailed("it died"))
        moved = await stage.pool.acquire_instead(places[1])
        assert moved is not None
        assert (moved.name, moved.label) == ("e2", "line-0")
