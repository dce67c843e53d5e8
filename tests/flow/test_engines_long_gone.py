"""A run of weeks sees thousands of engines come and go: what is done for a rollout, and what is told, is of those that are there."""

import sys

import pytest
from doubles import Spine, checkpoint

from headway.events import EngineState
from headway.flow.engine_pool import EnginePool
from headway.flow.watchdog import Pulse
from headway.sim.engine import SimEngine


def pool_after(departures):
    """A pool with one engine that serves, after as many others have joined, served and left."""
    spine = Spine()
    engine = SimEngine("e0")
    pool = EnginePool([engine], record=spine.record, clock=spine.clock, lost_timeout_seconds=60.0)
    pool.serves("e0", checkpoint(0))
    for number in range(1, departures + 1):
        pool.joins(SimEngine(f"e{number}"))
        pool.serves(f"e{number}", checkpoint(0))
        pool.leaves(f"e{number}")
    return pool


async def calls_of_a_place(pool):
    """How many functions are called to choose an engine and to give the place back."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        place = await pool.acquire()
        pool.release(place)
    finally:
        sys.setprofile(None)
    return calls


async def test_a_place_costs_the_same_however_many_engines_have_left():
    assert await calls_of_a_place(pool_after(200)) == await calls_of_a_place(pool_after(0))


async def test_who_has_left_is_known_by_name_and_its_name_is_not_given_again():
    pool = pool_after(2)
    assert (pool.state("e1"), pool.label("e1"), [engine.name for engine in pool.engines]) == ("left", checkpoint(0).label, ["e0"])
    with pytest.raises(ValueError, match="is, or was, another engine"):
        pool.joins(SimEngine("e1"))


async def test_a_rollout_gives_its_place_back_at_an_engine_that_has_left():
    pool = pool_after(0)
    pool.joins(SimEngine("e1"))
    pool.serves("e1", checkpoint(0))
    places = [await pool.acquire() for _ in range(2)]
    pool.leaves("e1")
    for place in places:
        pool.release(place)
        pool.worked(place)
    assert (pool.state("e1"), pool.deeds("e1"), dict(pool.load)) == ("left", 1, {"sim://e0": 0})


async def test_a_stall_is_told_of_without_the_engines_that_have_left():
    pulse = Pulse()
    for state in ("serving", "leaving", "left"):
        pulse.heed(EngineState(0.0, "e1", state, "x-0"))
    pulse.heed(EngineState(0.0, "e2", "serving", "x-0"))
    assert pulse.engines == {"e2": "serving x-0"}
