"""What the pool is told too late, or twice: it changes nothing. And what the end of a run says of the engines that it was lost to."""

import pytest
from doubles import beside, checkpoint, turns
from pool_fleet import Fleet, taken

from headway.errors import EngineFailed
from headway.events import EngineState


def told(fleet, since=0):
    return [(event.engine, event.state) for event in fleet.spine.of(EngineState)][since:]


async def test_who_never_left_and_who_has_left_cannot_be_told_to_stay():
    fleet = Fleet(2)
    said = len(told(fleet))
    fleet.pool.stays("e0")
    assert told(fleet, said) == []
    fleet.pool.leaves("e0")
    fleet.pool.leaves("e0")  # again: it is under way
    fleet.pool.stays("e0")
    assert told(fleet, said) == [("e0", "leaving"), ("e0", "left")], "it had nothing in flight: it was gone at once"
    assert await taken(fleet.pool, 2) == ["e1", "e1"]


async def test_one_that_stays_while_it_is_drained_goes_on_being_drained():
    fleet = Fleet(2, waits=True)
    place = await fleet.pool.acquire()
    async with beside(fleet.pool.drained(place.name)):
        await turns()
        fleet.pool.leaves(place.name)
        fleet.pool.stays(place.name)
        assert told(fleet, -1) == [(place.name, "draining")]
        other = (await taken(fleet.pool, 1))[0]
        assert other != place.name
        fleet.pool.release(place)


async def test_weights_that_arrive_at_an_engine_that_has_left_bring_it_back_to_nobody():
    fleet = Fleet(2)
    fleet.pool.syncs("e0")
    fleet.pool.leaves("e0")
    said = len(told(fleet))
    fleet.pool.serves("e0", checkpoint(7))
    assert (fleet.pool.state("e0"), told(fleet, said)) == ("left", [])
    assert fleet.pool.weights.version == 0, "nobody serves it"


async def test_an_engine_that_is_lost_is_under_no_sync():
    fleet = Fleet(1)
    fleet.lose("e0")
    fleet.pool.syncs("e0")
    assert fleet.pool.state("e0") == "lost"


async def test_an_engine_that_comes_back_with_older_weights_does_not_make_them_the_newest():
    fleet = Fleet(2)
    fleet.pool.serves("e0", checkpoint(3))
    fleet.lose("e1")
    fleet.pool.serves("e1", checkpoint(2))
    assert (fleet.pool.version, fleet.pool.weights.version) == (2, 3)


async def test_the_end_for_want_of_engines_shows_what_each_of_them_left_behind():
    fleet = Fleet(2, lost_timeout_seconds=5.0)
    for name in ("e0", "e1"):
        fleet.pool.lost(name, EngineFailed("it died", detail=f"the last lines of {name}"))
    with pytest.raises(EngineFailed, match=r"e0 was lost: it died; e1 was lost: it died") as found:
        await fleet.pool.run()
    assert found.value.detail == "the last lines of e0\nthe last lines of e1"
