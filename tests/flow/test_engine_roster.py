"""Engines that join and leave: taken up like lost ones, seen off with their last rollout, one client at a URL, no name twice."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from doubles import beside, together, turns
from weights_stage import Stage, slow

from headway.errors import EngineFailed
from headway.events import EngineState, Published
from headway.flow.engine_roster import EngineRoster
from headway.sim.engine import EngineSettings, SimEngine
from headway.types import EngineAddress


class Lists:
    """The lists that a test gives, as they come."""

    def __init__(self):
        self.queue = asyncio.Queue()

    def name(self, *urls, kind="vllm"):
        self.queue.put_nowait([EngineAddress(url, kind) for url in urls])

    async def __aiter__(self):
        while True:
            yield await self.queue.get()


class Guest(SimEngine):
    """An engine at an address, which notes that its client was closed."""

    def __init__(self, name, address, settings, closed):
        super().__init__(name, settings)
        self._address = address
        self._note = closed.append

    @property
    def url(self):
        return self._address.url

    @property
    def kind(self):
        return self._address.kind

    async def close(self):
        self._note(self.name)
        await super().close()


class Guests(Stage):
    """A stage on which engines join those that are there from the start."""

    def __init__(self, *engines, settings=None, **more):
        super().__init__(*(engines or (slow(0.0),)), **more)
        self.lists = Lists()
        self.made = {}
        self.closed = []
        self.settings = settings or {}
        self.roster = EngineRoster(self.lists, make=self.make, pool=self.pool, let_go=self.watcher.let_go)

    def make(self, name, address):
        self.made[name] = Guest(name, address, self.settings.get(name, slow(0.0)), self.closed)
        return self.made[name]

    @asynccontextmanager
    async def running(self):
        async with beside(*await self.begun(), self.roster.run()):
            await turns()
            yield self

    def told(self, name):
        return [event.state for event in self.spine.of(EngineState) if event.engine == name]


async def test_one_that_joins_serves_once_it_has_the_weights_that_are_served():
    stage = Guests(settings={"engine-1": slow(3.0)})
    async with stage.running():
        stage.trainer.publish(1)
        await turns()
        stage.lists.name("http://a")
        await asyncio.sleep(1.0)
        assert stage.pool.states == {"e0": "serving line-1", "engine-1": "lost"}
        assert [(await stage.pool.acquire()).name for _ in range(3)] == ["e0"] * 3
        await asyncio.sleep(3.0)
        assert await stage.made["engine-1"].label() == "line-1"
        assert [(await stage.pool.acquire()).name for _ in range(3)] == ["engine-1"] * 3
    assert stage.told("engine-1") == ["serving"]


async def test_one_that_leaves_ends_what_is_in_flight_takes_nothing_new_and_is_closed():
    stage = Guests()
    async with stage.running():
        stage.lists.name("http://a")
        await turns(50)
        places = [await stage.pool.acquire() for _ in range(4)]
        stage.lists.name()
        await turns()
        assert stage.pool.states["engine-1"] == "leaving line-0"
        assert {(await stage.pool.acquire()).name for _ in range(3)} == {"e0"}
        there = [place for place in places if place.name == "engine-1"]
        stage.pool.release(there[0])
        await turns()
        assert (stage.closed, "engine-1" in stage.pool.states) == ([], True)
        stage.trainer.publish(1)  # what is in flight there goes on under the new weights
        await turns(50)
        assert stage.made["engine-1"].version == 1
        assert stage.spine.ledger.version == 1
        stage.pool.release(there[1])
        await turns()
        assert (stage.closed, list(stage.pool.states)) == (["engine-1"], ["e0"])
        assert not stage.pool.lost_since(there[1])
    assert stage.told("engine-1") == ["serving", "leaving", "leaving", "left"]


async def test_the_same_url_may_come_back_under_a_name_of_its_own():
    stage = Guests()
    async with stage.running():
        for _ in range(3):
            stage.lists.name("http://a", "http://b")
            await turns(50)
            stage.lists.name()
            await turns(50)
        assert list(stage.made) == [f"engine-{n}" for n in range(1, 7)]
        assert sorted(stage.closed) == sorted(stage.made)


async def test_one_that_is_named_again_before_it_has_left_stays():
    stage = Guests()
    async with stage.running():
        stage.lists.name("http://a")
        await turns(50)
        places = [await stage.pool.acquire() for _ in range(2)]
        stage.lists.name()
        await turns()
        stage.lists.name("http://a")
        await turns()
        for place in places:
            stage.pool.release(place)
        await turns(50)
        assert stage.pool.states == {"e0": "serving line-0", "engine-1": "serving line-0"}
        assert (stage.closed, list(stage.made)) == ([], ["engine-1"])


async def test_at_the_url_of_one_that_leaves_nobody_joins_until_it_has_left_also_not_as_another_kind():
    stage = Guests()
    async with stage.running():
        stage.lists.name("http://a")
        await turns(50)
        places = [await stage.pool.acquire() for _ in range(2)]
        stage.lists.name("http://a", kind="sglang")
        await turns(50)
        assert list(stage.made) == ["engine-1"]
        for place in places:
            stage.pool.release(place)
        await turns(50)
        assert (stage.closed, list(stage.made)) == (["engine-1"], ["engine-1", "engine-2"])
        assert stage.made["engine-2"].kind == "sglang"


async def test_one_that_the_config_names_is_not_the_lists_to_name():
    stage = Guests()
    async with stage.running():
        stage.lists.name("sim://e0")
        await turns(50)
        stage.lists.name()
        await turns(50)
        assert (stage.made, list(stage.pool.states)) == ({}, ["e0"])


async def test_one_that_leaves_during_its_sync_ends_it_and_holds_nobody_up():
    stage = Guests(slow(1.0), settings={"engine-1": slow(100.0)})
    async with stage.running():
        stage.lists.name("http://a")
        await asyncio.sleep(101.0)
        stage.trainer.publish(1)
        await asyncio.sleep(2.0)
        assert stage.pool.states["engine-1"] == "syncing line-0"
        stage.lists.name()
        await turns(50)
        assert (stage.closed, stage.made["engine-1"].paused) == (["engine-1"], False)
        assert [event.version for event in stage.spine.of(Published)] == [1]
    assert stage.told("engine-1") == ["serving", "leaving", "left"]


async def test_one_that_leaves_while_it_is_taken_up_is_let_go():
    stage = Guests(settings={"engine-1": slow(100.0)})
    async with stage.running():
        stage.lists.name("http://a")
        await asyncio.sleep(1.0)
        assert stage.made["engine-1"].paused
        stage.lists.name()
        await turns(50)
        assert (stage.closed, stage.made["engine-1"].paused) == (["engine-1"], False)
    assert stage.told("engine-1") == ["leaving", "left"]


async def test_one_that_joins_during_a_roll_gets_the_version_of_the_roll():
    stage = Guests(slow(10.0), slow(10.0), rolling=True)
    async with stage.running():
        stage.trainer.publish(1)
        await asyncio.sleep(5.0)
        stage.lists.name("http://a")
        await asyncio.sleep(1.0)
        assert stage.pool.states["engine-2"] == "serving line-1"
        assert stage.spine.ledger.version == 0
        await asyncio.sleep(15.0)
        assert stage.spine.ledger.version == 1


async def test_one_that_dies_while_it_leaves_has_left_and_who_was_there_moves_on():
    stage = Guests()
    async with stage.running():
        stage.lists.name("http://a")
        await turns(50)
        places = {place.name: place for place in [await stage.pool.acquire() for _ in range(2)]}
        told = asyncio.Event()
        places["engine-1"].give_up = told.set
        stage.lists.name()
        await turns()
        assert not told.is_set()
        stage.pool.lost("engine-1", EngineFailed("it died"))
        assert told.is_set()  # its requests may hang, and nobody looks any more
        await turns(50)
        assert await stage.probe.lost_since(places["engine-1"])
        stage.pool.release(places["engine-1"])
        assert stage.closed == ["engine-1"]
    assert stage.told("engine-1") == ["serving", "leaving", "lost", "left"]


async def test_one_that_is_lost_and_then_leaves_has_its_attempts_given_up():
    stage = Guests(settings={"engine-1": EngineSettings(dies_at=5.0)})
    async with stage.running():
        stage.lists.name("http://a")
        await turns(50)
        places = {place.name: place for place in [await stage.pool.acquire() for _ in range(2)]}
        told = asyncio.Event()
        places["engine-1"].give_up = told.set
        await asyncio.sleep(15.0)
        assert stage.pool.states["engine-1"] == "lost"
        assert not told.is_set()
        stage.lists.name()
        await turns()
        assert told.is_set()


async def test_an_empty_list_ends_the_run_only_when_it_has_been_empty_for_too_long():
    stage = Guests(lost_timeout_seconds=30.0)
    stage.pool.leaves("e0")
    stage.lists.name("http://a")

    async def story():
        await asyncio.sleep(100.0)
        stage.lists.name()
        await asyncio.sleep(29.0)
        stage.lists.name("http://a")
        await asyncio.sleep(100.0)
        stage.lists.name()
        await asyncio.sleep(1000.0)

    await turns()
    with pytest.raises(EngineFailed, match=r"no engine has served for 30 s .*: engine\.urls_file names none"):
        await together(*await stage.begun(), stage.roster.run(), story())
    assert stage.spine.clock() == 100 + 29 + 100 + 30
