"""The engine probe: what is dead is noticed, what is busy is left alone, and what comes back gets the right weights before it counts."""

import asyncio

import pytest
from doubles import beside, together, turns
from weights_stage import Stage, slow

from headway.errors import EngineFailed, EngineSilent
from headway.events import EngineState, Published
from headway.sim.engine import EngineSettings

FINE = EngineSettings()


def states(stage, engine="e0"):
    return [(event.state, event.label) for event in stage.spine.of(EngineState) if event.engine == engine]


def published(stage):
    return [(event.version, event.engines) for event in stage.spine.of(Published)]


async def test_a_dead_engine_is_noticed_within_seconds():
    stage = Stage(EngineSettings(dies_at=12.0), FINE)
    async with beside(*await stage.begun()):
        await asyncio.sleep(18)
        assert [engine.name for engine in stage.pool.serving] == ["e1"]
    [lost] = [event for event in stage.spine.of(EngineState) if event.state == "lost"]
    assert 12 <= lost.time <= 17


async def test_an_attempt_that_failed_has_its_engine_looked_at_now():
    stage = Stage(EngineSettings(dies_at=1.0), FINE)
    async with beside(*await stage.begun()):
        first, second = await stage.pool.acquire(), await stage.pool.acquire()
        await asyncio.sleep(1.0)
        asked = await asyncio.gather(*(stage.probe.lost_since(place) for place in (first, second, first)))
        assert (asked, stage.spine.clock()) == ([True, False, True], 1.0)


async def test_an_engine_started_anew_gets_what_is_served_before_it_counts():
    stage = Stage(EngineSettings(transfer_seconds=3.0, dies_at=12.0, back_at=13.0), FINE)
    async with beside(*await stage.begun()):
        stage.trainer.publish(1)
        await asyncio.sleep(15.5)
        assert stage.engines[0].version == 1
        stage.trainer.publish(2)
        await asyncio.sleep(1.5)
        assert [engine.name for engine in stage.pool.serving] == ["e1"]  # the other one is being loaded
        assert published(stage)[-1] == (2, ("e1",))
        await asyncio.sleep(20)
        assert await stage.engines[0].label() == "line-2"
    assert states(stage) == [("serving", "line-1"), ("lost", "line-1"), ("serving", "line-2")]


async def test_an_engine_that_was_restarted_between_two_looks_is_noticed_by_its_label():
    stage = Stage(EngineSettings(dies_at=11.0, back_at=11.5))
    async with beside(*await stage.begun()):
        stage.trainer.publish(1)
        await asyncio.sleep(20)
        assert await stage.engines[0].label() == "line-1"
    assert states(stage) == [("serving", "line-1"), ("lost", "line-1"), ("serving", "line-1")]


async def test_a_version_that_comes_while_an_engine_is_taken_up_is_the_one_it_gets():
    stage = Stage(EngineSettings(transfer_seconds=8.0, dies_at=2.0, back_at=3.0), FINE)
    async with beside(*await stage.begun()):
        await asyncio.sleep(8)
        stage.trainer.publish(1)
        await asyncio.sleep(30)
        assert [engine.version for engine in stage.engines] == [1, 1]
    assert published(stage) == [(1, ("e1",))]
    assert states(stage) == [("lost", "line-0"), ("serving", "line-1")]


async def test_the_only_engine_dies_in_a_sync_and_the_version_is_published_when_it_is_back():
    stage = Stage(EngineSettings(transfer_seconds=4.0, dies_at=2.0, back_at=30.0))
    async with beside(*await stage.begun()):
        stage.trainer.publish(1)
        await asyncio.sleep(25)
        assert (published(stage), stage.pool.serving) == ([], [])
        stage.trainer.publish(2)
        await asyncio.sleep(25)
    assert published(stage) == [(2, ("e0",))]
    assert stage.watcher.sync_seconds > 0


async def test_C01_the_only_engine_dies_for_good_and_the_run_ends_with_its_name_and_cause():
    stage = Stage(EngineSettings(dies_at=12.0))
    with pytest.raises(EngineFailed, match=r"no engine has served for 60 s .*: e0 was lost: e0 died at 12 s"):
        await together(*await stage.begun())
    assert stage.spine.clock() <= 12 + 5 + 60


async def test_an_engine_that_refuses_every_sync_ends_the_run_though_it_answers():
    stage = Stage(FINE)

    async def refused(checkpoint):
        await asyncio.sleep(50)
        raise EngineFailed("it answered 500: out of memory")

    stage.engines[0].transfer = refused
    stage.trainer.publish(1)
    with pytest.raises(EngineFailed, match="e0 was lost: it answered 500: out of memory"):
        await together(*await stage.begun())
    assert not stage.engines[0].paused
    assert stage.spine.clock() < 600


async def test_I06_one_of_four_engines_that_never_answers_a_load_does_not_hold_up_the_others_for_ever():
    stage = Stage(EngineSettings(hangs=frozenset({("transfer", 1)})), slow(2.0), slow(2.0), slow(2.0))
    answer = stage.engines[0].transfer

    async def limited(checkpoint):
        try:
            async with asyncio.timeout(120.0):
                await answer(checkpoint)
        except TimeoutError:
            raise EngineFailed("was not answered within 120 s") from None

    stage.engines[0].transfer = limited
    async with beside(*await stage.begun()):
        stage.trainer.publish(1)
        await asyncio.sleep(3)
        assert [engine.paused for engine in stage.engines] == [True, False, False, False]
        await asyncio.sleep(118)
        assert published(stage)[-1] == (1, ("e1", "e2", "e3"))
        await asyncio.sleep(5)
    assert not any(engine.paused for engine in stage.engines)
    assert states(stage) == [("lost", "line-0"), ("serving", "line-1")]


async def test_H06_an_engine_that_answers_late_is_busy_and_not_dead():
    stage = Stage(FINE)
    everything = await stage.begun()
    label = stage.engines[0].label

    async def late():
        await asyncio.sleep(45)
        return await label()

    stage.engines[0].label = late
    async with beside(*everything):
        place = await stage.pool.acquire()
        asked = asyncio.ensure_future(stage.probe.lost_since(place))
        await asyncio.sleep(50)
        stage.engines[0].label = label
        await asyncio.sleep(100)
        assert await asked is False
    assert states(stage) == []


async def test_an_engine_that_is_silent_for_a_minute_is_lost_and_attempts_there_are_cut_short():
    stage = Stage(FINE, FINE)
    everything = await stage.begun()

    async def silent():
        await asyncio.get_running_loop().create_future()

    stage.engines[0].label = silent
    async with beside(*everything):

        async def attempt():
            place = await stage.pool.acquire()
            try:
                await silent()
            finally:
                stage.pool.release(place)

        attempts = [asyncio.ensure_future(attempt()) for _ in range(2)]
        await asyncio.sleep(85)
        assert not any(task.done() for task in attempts)
        await asyncio.sleep(10)
        assert [task.done() for task in attempts] == [True, False]
        attempts[1].cancel()
        await turns()
    assert states(stage) == [("lost", "line-0")]


async def test_an_engine_that_hangs_in_a_sync_and_then_answers_nothing_has_its_attempts_cut_short():
    stage = Stage(FINE, FINE)
    everything = await stage.begun()

    async def unanswered(*_):
        await asyncio.sleep(120)
        raise EngineSilent("not answered within 120 s")

    async with beside(*everything):
        place = await stage.pool.acquire()
        told = asyncio.Event()
        place.give_up = told.set
        stage.engines[0].transfer = stage.engines[0].label = unanswered
        stage.trainer.publish(1)
        await asyncio.sleep(200)
        assert stage.pool.lost_since(place)
        assert not told.is_set()  # it may be at work still
        await asyncio.sleep(60)
        assert told.is_set()


async def test_a_look_that_its_own_limit_ends_is_no_answer_and_no_refusal():
    stage = Stage(FINE)
    everything = await stage.begun()

    async def unanswered():
        await asyncio.sleep(2)
        raise EngineSilent("not answered within 2 s")

    stage.engines[0].label = unanswered
    async with beside(*everything):
        await asyncio.sleep(30)
        assert states(stage) == []
        await asyncio.sleep(20)
        assert states(stage) == [("lost", "line-0")]


async def test_nobody_looks_at_an_engine_while_it_is_synced():
    stage = Stage(slow(100.0))
    label, asked = stage.engines[0].label, []

    async def refused():
        if stage.watcher.syncing and stage.engines[0].paused:
            asked.append(stage.spine.clock())
            raise EngineFailed("cannot be reached")
        return await label()

    stage.engines[0].label = refused
    async with beside(*await stage.begun()):
        stage.trainer.publish(1)
        await asyncio.sleep(150)
    assert states(stage) == [("serving", "line-1")]
    assert asked
