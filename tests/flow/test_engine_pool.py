"""The engine pool: the least loaded engine that serves, nothing for one that is lost, and an end when none comes back."""

import asyncio

import pytest
from doubles import Spine, beside, checkpoint, together, turns
from pool_fleet import Fleet, taken

from headway.errors import EngineFailed, EngineUnreachable
from headway.events import EngineState
from headway.flow.engine_pool import EnginePool
from headway.sim.engine import SimEngine


async def test_places_go_to_the_least_loaded_engine():
    pool = Fleet().pool
    places = [await pool.acquire() for _ in range(6)]
    assert pool.load == {"sim://e0": 2, "sim://e1": 2, "sim://e2": 2}
    for place in places:
        if place.name == "e1":
            pool.release(place)
    assert await taken(pool, 2) == ["e1", "e1"]


async def test_I10_idle_engines_are_chosen_in_turn():
    pool, chosen = Fleet(4).pool, []
    for _ in range(64):
        place = await pool.acquire()
        chosen.append(place.name)
        pool.release(place)
    assert {name: chosen.count(name) for name in set(chosen)} == {"e0": 16, "e1": 16, "e2": 16, "e3": 16}


async def test_nothing_goes_to_a_lost_engine_until_it_serves_again():
    fleet = Fleet(2)
    fleet.lose("e0")
    assert await taken(fleet.pool, 3) == ["e1"] * 3
    assert [engine.name for engine in fleet.pool.serving] == ["e1"]
    fleet.pool.serves("e0", checkpoint(0))
    assert await taken(fleet.pool, 3) == ["e0"] * 3
    assert [(event.engine, event.state) for event in fleet.spine.of(EngineState)][2:] == [("e0", "lost"), ("e0", "serving")]


async def test_while_none_serves_a_rollout_waits_and_then_all_go_at_once():
    fleet = Fleet(2, serving=False)
    waiting = [asyncio.ensure_future(fleet.pool.acquire()) for _ in range(4)]
    await turns()
    waiting[0].cancel()
    await turns()
    assert not any(task.done() for task in waiting[1:])
    fleet.pool.serves("e1", checkpoint(0))
    assert [(await task).name for task in waiting[1:]] == ["e1"] * 3
    assert fleet.pool.load == {"sim://e0": 0, "sim://e1": 3}


async def test_a_rollout_that_ends_after_its_engine_was_lost_says_nothing_for_the_successor():
    fleet = Fleet(1)
    before = await fleet.pool.acquire()
    fleet.pool.worked(before)
    fleet.lose("e0")
    fleet.pool.worked(before)  # its last turn was over: only its environment was still busy
    assert fleet.pool.deeds("e0") == 1
    fleet.pool.serves("e0", checkpoint(0))
    fleet.pool.worked(before)
    assert fleet.pool.deeds("e0") == 1
    fleet.pool.worked(await fleet.pool.acquire())
    assert fleet.pool.deeds("e0") == 2


async def test_an_engine_that_is_lost_twice_is_lost_once():
    fleet = Fleet(1)
    place = await fleet.pool.acquire()
    assert not fleet.pool.lost_since(place)
    fleet.lose("e0", "first")
    fleet.lose("e0", "then")
    assert fleet.pool.lost_since(place)
    assert [event.state for event in fleet.spine.of(EngineState)] == ["serving", "lost"]
    fleet.pool.serves("e0", checkpoint(1))
    assert fleet.pool.lost_since(place)
    assert not fleet.pool.lost_since(await fleet.pool.acquire())


async def test_the_version_is_the_oldest_of_those_that_serve_and_a_sync_counts_as_serving():
    fleet = Fleet(2)
    fleet.pool.syncs("e0")
    fleet.pool.syncs("e1")
    fleet.pool.serves("e0", checkpoint(1))
    assert (fleet.pool.version, fleet.pool.weights.version, len(fleet.pool.serving)) == (0, 1, 2)
    assert fleet.pool.states == {"e0": "serving line-1", "e1": "syncing line-0"}
    fleet.lose("e1")
    assert (fleet.pool.version, fleet.pool.states["e1"]) == (1, "lost")
    fleet.lose("e0")
    assert fleet.pool.version == -1


async def test_C01_when_none_has_served_for_too_long_the_run_ends_with_engine_and_cause():
    fleet = Fleet(2, lost_timeout_seconds=30.0)

    async def story():
        await asyncio.sleep(100)
        fleet.lose("e0", "killed by SIGKILL")
        await asyncio.sleep(100)  # the other serves
        fleet.lose("e1", "connection refused")
        await asyncio.sleep(1000)

    said = r"no engine has served for 30 s .*: e0 was lost: killed by SIGKILL; e1 was lost: connection refused"
    telling = asyncio.ensure_future(story())
    with pytest.raises(EngineFailed, match=said) as caught:
        await fleet.pool.run()
    telling.cancel()
    assert asyncio.get_running_loop().time() == 230.0
    assert str(caught.value.__cause__) == "killed by SIGKILL"


async def test_an_engine_that_is_back_in_time_starts_the_time_anew():
    fleet = Fleet(1, lost_timeout_seconds=30.0)
    async with beside(fleet.pool.run()):
        for _ in range(5):
            fleet.lose("e0")
            await asyncio.sleep(29)
            fleet.pool.serves("e0", checkpoint(0))
            await turns()


async def test_time_in_which_somebody_brings_an_engine_back_does_not_count():
    fleet = Fleet(1, lost_timeout_seconds=30.0)

    async def story():
        with fleet.pool.returning("e0"):
            fleet.lose("e0")
            await asyncio.sleep(500)
        await asyncio.sleep(1000)

    with pytest.raises(EngineFailed):
        await together(fleet.pool.run(), story())
    assert asyncio.get_running_loop().time() == 530.0


async def test_attempts_at_an_engine_that_hangs_are_cut_short():
    fleet, cut = Fleet(2), []

    async def attempt():
        place = await fleet.pool.acquire()
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cut.append((place.name, place.cut))
            raise
        finally:
            fleet.pool.release(place)

    attempts = [asyncio.ensure_future(attempt()) for _ in range(4)]
    await turns()
    fleet.lose("e0", hangs=True)
    await asyncio.wait(attempts, timeout=1.0)
    assert cut == [("e0", True), ("e0", True)]
    assert fleet.pool.load == {"sim://e0": 0, "sim://e1": 2}
    for task in attempts:
        task.cancel()


async def test_at_the_start_the_run_does_without_engines_for_as_long_as_they_may_take_to_start():
    spine = Spine()
    pool = EnginePool([], record=spine.record, clock=spine.clock, lost_timeout_seconds=30.0, start_timeout_seconds=300.0)
    with pytest.raises(
        EngineFailed, match=r"no engine has served for 300 s \(engine\.start_timeout_seconds\): engine\.urls_file names none"
    ):
        await pool.run()
    assert asyncio.get_running_loop().time() == 300.0


async def test_names_are_never_used_twice():
    fleet = Fleet(1)
    fleet.pool.joins(SimEngine("e1"))
    fleet.pool.leaves("e1")
    with pytest.raises(ValueError, match="e1 is, or was, another engine"):
        fleet.pool.joins(SimEngine("e1"))
    assert fleet.pool.states == {"e0": "serving line-0"}


async def test_new_rollouts_go_to_an_engine_under_a_sync_only_where_all_are():
    fleet = Fleet(2)
    fleet.pool.syncs("e0")
    assert await taken(fleet.pool, 4) == ["e1"] * 4
    fleet.pool.syncs("e1")
    assert await taken(fleet.pool, 4) == ["e0"] * 4


async def test_why_an_engine_that_is_tried_again_for_ever_does_not_serve_is_said_once(caplog):
    fleet = Fleet(1, serving=False)
    for why in ("cannot be reached", "cannot be reached", "answered 404", "cannot be reached"):
        fleet.lose("e0", why)
    said = [record.getMessage() for record in caplog.records if "does not serve yet" in record.getMessage()]
    assert said == [f"e0 does not serve yet, and is tried again: {why}" for why in ("cannot be reached", "answered 404")]
    fleet.pool.serves("e0", checkpoint(0))
    fleet.lose("e0", "it died")
    fleet.pool.lost("e0", EngineUnreachable("nobody is there"))  # which "lost" has told
    fleet.lose("e0", "has another model")
    assert caplog.messages[-2:] == ["e0 is lost: it died", "e0 does not serve yet, and is tried again: has another model"]
