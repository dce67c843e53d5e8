"""Places for groups that are not live: reserved before they are given, within the slack that there is, and no side starves."""

import asyncio
import random
import sys

import pytest
from doubles import Spine, beside, prompt, turns
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.events import Ingested
from headway.flow.gate import CapacityGate
from headway.rules.admission import GateLimits
from headway.rules.batching import chosen
from headway.sim.loop import run
from headway.types import Admission


def gate(spine, *, b=2, g=2, ahead=1.0, **more):
    limits = GateLimits(groups_per_batch=b, group_size=g, max_concurrent=100, steps_ahead=ahead, steps=1000, **more)
    return CapacityGate(limits, watch=spine.watch, record=spine.record, clock=spine.clock)


def background(coroutine):
    return asyncio.ensure_future(coroutine)


def offered(door, n=1, source="external"):
    return [background(door.admit_replayed(f"from outside {i}", source, 3)) for i in range(n)]


def places(spine):
    return [event.k for event in spine.of(Ingested)]


async def form_and_train(spine, version, b):
    """Let everything become ready, form batch `version` of b groups, train it, serve what it made."""
    for group in [*spine.ledger.running, *spine.ledger.ingested]:
        spine.ready_now(group)
    spine.form(*chosen(spine.ledger, b - spine.ledger.promised.get(version, 0)))
    spine.acknowledge(version)
    spine.publish(version + 1)
    await turns(100)


async def calls_of_a_change(waiting):
    """How many functions are called, when something changes, for so many groups that wait for a place where there is none."""
    spine = Spine()
    door = gate(spine, b=4, ahead=1.0, replayed_groups=1)
    offers = offered(door, 2 + waiting)  # two have places
    await turns()
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    spine.watch.touch()
    sys.setprofile(count)
    try:
        await asyncio.sleep(0)
    finally:
        sys.setprofile(None)
    for offer in offers:
        offer.cancel()
    await asyncio.gather(*offers, return_exceptions=True)
    return calls


async def test_however_many_groups_of_a_source_wait_for_a_place_it_is_looked_for_once():
    assert await calls_of_a_change(200) == await calls_of_a_change(1)


async def test_a_place_is_recorded_before_it_is_given_and_takes_that_of_a_live_group():
    spine = Spine()
    door = gate(spine, b=4, ahead=1.0, replayed_groups=1)
    assert door.capacity == 8
    waiting = offered(door, 5)
    await turns()
    assert [task.done() for task in waiting] == [True, True, False, False, False]
    assert waiting[0].result() == Ingested(0.0, 0, "from outside 0", "external", 3, 0)
    assert [waiting[1].result(), *spine.events[1:]] == [spine.events[2], spine.events[1], spine.events[2]]
    assert places(spine) == [0, 1]
    assert (door.capacity, door.reason) == (6, "open")
    assert spine.ledger.rollouts_in_flight == 0
    for task in waiting:
        task.cancel()


async def test_without_slack_there_is_no_place_until_there_is():
    spine = Spine()
    door = gate(spine, b=2, ahead=0.0, replayed_groups=1)
    for n in range(2):
        await door.admit(prompt(n))
    assert door.try_admit_replayed("now", "external", 1) is None
    waiting = offered(door)[0]
    await turns()
    assert not waiting.done()
    spine.drop(1)
    assert (await waiting).k == 0
    assert door.capacity == 0


@pytest.mark.parametrize("closed", ["not published", "paused", "draining", "nothing may be replayed"])
async def test_there_is_no_place_where_no_group_may_start_and_none_by_default(closed):
    spine = Spine(published=closed != "not published")
    door = gate(spine, replayed_groups=0 if closed == "nothing may be replayed" else 1)
    if closed == "paused":
        door.pause()
    if closed == "draining":
        spine.drain()
    assert door.try_admit_replayed("now", "replay", 1) is None
    waiting = offered(door)[0]
    await turns()
    assert waiting.done() == (closed == "draining")
    if closed == "paused":
        door.resume()
        assert (await waiting).k == 0
    else:
        spine.drain()
        assert await waiting is None
        assert not places(spine)


async def test_a_stream_of_live_groups_does_not_starve_a_replayed_one():
    spine = Spine()
    door = gate(spine, b=4, ahead=1.0, replayed_groups=1)

    async def admit_for_ever():
        for n in range(10**6):
            await door.admit(prompt(n))

    async with beside(admit_for_ever()):
        await turns(100)
        assert len(spine.ledger.running) == 8
        for version in range(4):
            waiting = offered(door, 3)
            await turns(100)
            assert not any(task.done() for task in waiting)
            await form_and_train(spine, version, 4)
            assert [task.done() for task in waiting] == [True, version == 0, False]  # batch 1 has room too, when the first come
            assert places(spine)[-1] == version + 2
            assert len(spine.ledger.running) == (2 if version == 0 else 3)
            for task in waiting:
                task.cancel()
            await turns(100)


async def test_a_stream_of_replayed_groups_does_not_starve_live_ones():
    spine = Spine()
    door = gate(spine, b=4, ahead=1.0, replayed_groups=3)

    async def offer_for_ever():
        while True:
            await door.admit_replayed("again", "replay", 1)

    async def admit_for_ever():
        for n in range(10**6):
            await door.admit(prompt(n))

    async with beside(offer_for_ever(), admit_for_ever()):
        await turns(100)
        for version in range(5):
            assert spine.ledger.promised == {version: 3, version + 1: 3}
            assert len(spine.ledger.running) + len(spine.ledger.ready) == 2
            await form_and_train(spine, version, 4)


async def test_capacity_is_left_to_replayed_groups_until_they_have_it_or_give_up():
    spine = Spine()
    door = gate(spine, b=4, ahead=0.0, replayed_groups=3)
    for n in range(3):
        await door.admit(prompt(n))
    door.pause()
    waiting = offered(door, 2)
    await turns()
    door._paused = False  # as `resume`, before anybody has noticed
    assert (door.capacity, door.reason) == (0, "replay's turn")
    for task in waiting:
        task.cancel()
    await turns()
    assert (door.capacity, door.reason) == (1, "open")
    await door.admit(prompt(3))
    assert door.reason == "staleness"


async def test_files_and_http_take_places_in_turn():
    spine = Spine()
    door = gate(spine, b=2, ahead=0.0, replayed_groups=1)

    async def keep_offering(source):
        while True:
            await door.admit_replayed(source, source, 1)

    async with beside(*(keep_offering("replay") for _ in range(3)), keep_offering("external")):
        for version in range(6):
            await turns(100)
            await form_and_train(spine, version, 1)
        sources = [event.source for event in spine.of(Ingested)]
        assert sources == ["replay", "external"] * 3 + ["replay"]


async def test_who_is_alone_need_not_wait_for_its_turn():
    spine = Spine()
    door = gate(spine, b=4, ahead=0.0, replayed_groups=3)
    assert [door.try_admit_replayed("a", "external", 1).k for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
async def test_where_deadlines_are_kept_a_place_is_looked_for_further_ahead(on_stale):
    spine = Spine()
    door = gate(spine, b=2, ahead=1.0, replayed_groups=1, max_staleness=1, on_stale=on_stale)
    for n in range(4):
        await door.admit(prompt(n))
    await form_and_train(spine, 0, 2)
    assert door.try_admit_replayed("a", "external", 1).k == 2  # both live groups are due in batch 1: it can spare none
    assert door.try_admit_replayed("b", "external", 1) is None
    waiting = offered(door)[0]
    await turns()
    assert not waiting.done()
    assert isinstance(await door.admit(prompt(4)), Admission)  # what no replayed group may have is not kept for it
    waiting.cancel()


async def _mixed(seed, b, replayed, ahead):
    """Live and replayed groups come, end and are trained at random; return what stood in each batch, and how often the gate was wrong."""
    draw, spine = random.Random(seed), Spine()
    door = gate(spine, b=b, g=1, ahead=ahead, replayed_groups=replayed)
    batches = []

    async def live():
        for n in range(10**6):
            await door.admit(prompt(n))

    async def outside(source):
        while True:
            await door.admit_replayed(source, source, 1)
            await asyncio.sleep(draw.choice([0, 1, 5]))

    async with beside(live(), outside("replay"), outside("external"), outside("external")):
        for version in range(12):
            await asyncio.sleep(draw.choice([0, 1, 5]))
            await turns(100)
            ledger = spine.ledger
            assert all(count <= replayed for count in ledger.promised.values())
            places_for_live = sum(b - ledger.promised.get(k, 0) for k in range(version, version + int(ahead) + 1))
            assert len(ledger.running) == places_for_live  # each capacity is used, none twice
            for group in [*ledger.running, *ledger.ingested]:
                spine.ready_now(group)
            taken = chosen(ledger, b - ledger.promised.get(version, 0))
            batches.append(len(taken))
            spine.form(*taken)
            for group in list(ledger.ready):
                spine.drop(group)
            spine.acknowledge(version)
            spine.publish(version + 1)
    return batches, {event.source for event in spine.of(Ingested)}


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.sampled_from([0.0, 1.0, 2.0]))
def test_batches_are_whole_whatever_comes_from_outside_and_every_side_gets_in(seed, order, b, replayed, ahead):
    batches, sources = run(_mixed(seed, b, min(b, replayed), ahead), seed=order)
    assert batches == [b] * 12
    assert sources == {"replay", "external"}
