"""A berth answers what its attempt asks, whoever asks and however late; and the place is given back once."""

import asyncio

import pytest
from doubles import Spine, checkpoint, turns

from headway.errors import EngineFailed
from headway.flow.berth import Berth
from headway.flow.engine_pool import EnginePool
from headway.sim.engine import SimEngine
from headway.types import EngineAddress


class Stage:
    """A pool, and the berth of an attempt at engine a. `looks`: what a look at an engine waits for."""

    def __init__(self, *, waits=False, looks=None, most_moves=10):
        self.spine = Spine()
        self.pool = EnginePool(
            [SimEngine(name) for name in "ab"],
            record=self.spine.record,
            clock=self.spine.clock,
            lost_timeout_seconds=60.0,
            waits=waits,
        )
        self.looks = looks
        self.most_moves = most_moves

    async def at_a(self):
        self.pool.serves("a", checkpoint(0))
        place = await self.pool.acquire()
        return Berth(self.pool, place, lost_since=self.lost_since, most_moves=self.most_moves)

    async def lost_since(self, place):
        if self.looks is not None:
            await self.looks.wait()
        return self.pool.lost_since(place)

    def lose(self, name):
        self.pool.lost(name, EngineFailed("it died"))


def at(url):
    return EngineAddress(f"sim://{url}")


async def test_of_two_requests_that_fail_together_the_second_goes_where_the_first_has_led():
    stage = Stage()
    berth = await stage.at_a()
    stage.pool.serves("b", checkpoint(1))
    stage.lose("a")
    assert await berth(at("a")) == at("b")
    assert await berth(at("a")) == at("b"), "it is no longer at a: nothing is to be looked at"
    assert (stage.pool.load, berth.moves) == ({"sim://a": 0, "sim://b": 1}, 2)
    berth.leave()
    assert stage.pool.load == {"sim://a": 0, "sim://b": 0}


@pytest.mark.parametrize("most_moves", [0, 1])
async def test_an_attempt_moves_no_more_often_than_it_may_whoever_asks(most_moves):
    stage = Stage(most_moves=most_moves)
    berth = await stage.at_a()
    stage.pool.serves("b", checkpoint(1))
    stage.lose("a")
    assert [await berth(at("a")) for _ in range(3)] == [at("b")] * most_moves + [None] * (3 - most_moves)
    assert berth.moves == most_moves


async def test_an_attempt_that_ends_while_its_engine_is_looked_at_takes_no_other_place():
    stage = Stage(looks=asyncio.Event())
    berth = await stage.at_a()
    stage.pool.serves("b", checkpoint(0))
    stage.lose("a")
    asking = asyncio.ensure_future(berth(at("a")))
    await turns()
    berth.leave()
    stage.looks.set()
    assert await asking is None
    assert stage.pool.load == {"sim://a": 0, "sim://b": 0}


async def test_where_no_rollout_may_have_tokens_of_two_versions_it_moves_to_the_same_weights_or_not_at_all():
    stage = Stage(waits=True)
    berth = await stage.at_a()
    stage.lose("a")
    asking = asyncio.ensure_future(berth(at("a")))
    await turns()
    assert not asking.done(), "nobody serves: one with the same weights may come back"
    stage.pool.serves("b", checkpoint(1))
    assert await asking is None
    berth.leave()
    assert stage.pool.load == {"sim://a": 0, "sim://b": 0}
