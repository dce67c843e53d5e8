"""Waiting for a condition: it is asked again after changes, once for all changes of an instant, and nobody is forgotten."""

import asyncio

import pytest
from doubles import Spine, turns

from headway.flow.watch import Watch
from headway.rules.ledger import Ledger


async def test_a_condition_that_holds_is_not_waited_for():
    await Watch(Ledger(version=3)).until(lambda now: now.version == 3)


async def test_who_waits_goes_on_when_history_makes_the_condition_true():
    spine = Spine()
    waiting = asyncio.ensure_future(spine.watch.until(lambda now: now.version >= 2))
    await turns()
    spine.publish(1)
    await turns()
    assert not waiting.done()
    spine.publish(2)
    await waiting


async def test_many_changes_of_one_instant_are_looked_at_once():
    spine, asked = Spine(), []
    waiting = asyncio.ensure_future(spine.watch.until(lambda now: bool(asked.append(now.version)) or now.version == 100))
    await turns()
    for version in range(1, 101):
        spine.publish(version)
    await waiting
    assert asked == [0, 100]


async def test_one_condition_that_many_wait_for_is_asked_once_for_all_of_them():
    spine, asked = Spine(), []

    def served(now):
        asked.append(now.version)
        return now.version == 2

    waiting = [asyncio.ensure_future(spine.watch.until(served)) for _ in range(100)]
    await turns()
    asked.clear()
    for version in (1, 2):
        spine.publish(version)
        await turns()
    assert asked == [1, 2]
    assert await asyncio.gather(*waiting) == [True] * 100


async def test_a_condition_that_raises_reaches_who_waits_and_nobody_else():
    spine = Spine()
    broken = asyncio.ensure_future(spine.watch.until(lambda now: 1 // (1 - now.version) < 0))
    sound = asyncio.ensure_future(spine.watch.until(lambda now: now.version == 1))
    await turns()
    spine.publish(1)
    await sound
    with pytest.raises(ZeroDivisionError):
        await broken


async def test_who_stops_waiting_is_not_asked_again():
    spine, asked = Spine(), []
    waiting = asyncio.ensure_future(spine.watch.until(lambda now: bool(asked.append(now.version))))
    await turns()
    waiting.cancel()
    await turns()
    spine.publish(1)
    await turns()
    assert asked == [0]


async def test_of_rollouts_that_end_only_those_hear_who_wait_for_slots():
    spine, asked = Spine(), []

    def hears(name):
        return lambda now: bool(asked.append((name, now.rollouts_in_flight)))

    admission = spine.admit(0, members=3)
    waiting = [asyncio.ensure_future(spine.watch.until(hears(name), slots=name == "slots")) for name in ("slots", "groups")]
    await turns()
    for member in range(2):
        spine.end(admission, member)
        await turns()
    assert asked == [("slots", 3), ("groups", 3), ("slots", 2), ("slots", 1)]
    spine.end(admission, 2)
    spine.ready_now(0)
    await turns()
    assert asked[4:] == [("slots", 0), ("groups", 0)]
    for task in waiting:
        task.cancel()


async def test_whoever_waited_is_told_so():
    spine = Spine()
    assert not await spine.watch.until(lambda now: now.version == 0)
    waiting = asyncio.ensure_future(spine.watch.until(lambda now: now.version == 1))
    await turns()
    spine.publish(1)
    assert await waiting
