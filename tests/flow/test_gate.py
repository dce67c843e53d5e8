"""The gate: reserved before it returns, never over a limit, each side in its turn (replay too), and a drain ends the wait."""

import asyncio
import random

import pytest
from doubles import Spine, beside, prompt, turns
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.events import Admitted, Ingested, RolloutDropped
from headway.flow.gate import CapacityGate
from headway.rules.admission import GateLimits
from headway.rules.batching import chosen
from headway.sim.loop import run
from headway.types import Admission


def gate(spine, *, b=2, g=2, concurrent=100, ahead=1.0, steps=1000, **more):
    limits = GateLimits(groups_per_batch=b, group_size=g, max_concurrent=concurrent, steps_ahead=ahead, steps=steps, **more)
    return CapacityGate(limits, watch=spine.watch, record=spine.record, clock=spine.clock)


def background(coroutine):
    return asyncio.ensure_future(coroutine)


async def test_a_group_is_reserved_before_leave_is_given():
    spine = Spine()
    door = gate(spine, b=1, ahead=0.0)
    waiting = [background(door.admit(prompt(n))) for n in range(5)]
    await turns()
    assert [task.done() for task in waiting] == [True, False, False, False, False]
    assert waiting[0].result() == Admission(0, prompt(0), 2, 0)
    assert spine.events[-1] == Admitted(0.0, 0, "p0", 0, 2, 0)
    assert (door.capacity, door.reason) == (0, "staleness")
    spine.drop(0)  # forgetting is the refund
    await turns()
    assert [task.done() for task in waiting] == [True, True, False, False, False]
    for task in waiting:
        task.cancel()


async def test_nobody_starts_before_a_version_is_published():
    spine = Spine(published=False)
    door = gate(spine)
    waiting = background(door.admit(prompt()))
    await turns()
    assert (waiting.done(), door.reason) == (False, "not published")
    spine.publish(3)
    assert (await waiting).birth == 3


async def test_a_drain_refuses_who_waits_and_who_comes():
    spine = Spine()
    door = gate(spine, b=1, ahead=0.0)
    await door.admit(prompt())
    waiting = background(door.admit(prompt(1)))
    await turns()
    spine.drain()
    assert await waiting is None
    assert await door.admit(prompt(2)) is None
    assert len(spine.of(Admitted)) == 1


async def test_evaluation_goes_on_while_the_run_drains():
    spine = Spine()
    door = gate(spine, concurrent=2)
    await door.admit(prompt())
    waiting = background(door.admit_eval())
    spine.drain()
    await turns()
    assert not waiting.done()
    spine.drop(0)
    await waiting
    assert door.eval_in_flight == 1


async def test_a_stream_of_evaluation_rollouts_does_not_starve_a_group():
    spine = Spine()
    door = gate(spine, g=4, concurrent=4)
    for _ in range(4):
        await door.admit_eval()
    group = background(door.admit(prompt()))
    await turns()
    more = [background(door.admit_eval()) for _ in range(3)]
    for _ in range(4):
        await turns()
        assert not group.done()
        assert not any(task.done() for task in more)
        door.release_eval()
    assert isinstance(await group, Admission)
    for member in range(4):
        spine.record(RolloutDropped(0.0, 0, member, 0, "timeout", "", 0, final=True))
    await asyncio.gather(*more)


async def test_a_stream_of_groups_does_not_starve_an_evaluation_rollout():
    spine = Spine()
    door = gate(spine, b=10, g=2, concurrent=2)
    await door.admit(prompt(0))
    rollout, group = background(door.admit_eval()), background(door.admit(prompt(1)))
    await turns()
    spine.drop(0)
    await rollout
    assert not group.done()
    door.release_eval()
    await group


async def test_who_gives_up_waiting_gives_up_its_turn():
    spine = Spine()
    door = gate(spine, b=10, g=2, concurrent=3)
    await door.admit_eval()  # training's turn now; 2 slots free
    await door.admit(prompt(0))  # evaluation's turn, all taken
    rollout, group = background(door.admit_eval()), background(door.admit(prompt(1)))
    await turns()
    spine.record(RolloutDropped(0.0, 0, 0, 0, "timeout", "", 0, final=True))
    await rollout
    held = background(door.admit_eval())
    spine.record(RolloutDropped(0.0, 0, 1, 0, "timeout", "", 0, final=True))
    await turns()
    assert (group.done(), held.done()) == (False, False)  # one slot free, kept for the group
    group.cancel()
    await held


async def test_a_paused_gate_lets_no_group_start_not_even_one_that_waited_already():
    spine = Spine()
    door = gate(spine, b=1, ahead=0.0)
    await door.admit(prompt(0))
    waiting = background(door.admit(prompt(1)))
    await turns()
    door.pause()
    spine.drop(0)
    await door.admit_eval()
    await turns()
    assert (waiting.done(), door.capacity, door.reason) == (False, 0, "paused")
    door.resume()
    assert isinstance(await waiting, Admission)


async def test_a_paused_gate_does_not_hold_up_a_drain():
    spine = Spine()
    door = gate(spine)
    door.pause()
    waiting = background(door.admit(prompt()))
    await turns()
    spine.drain()
    assert await waiting is None
    assert door.reason == "draining"


async def _rush(seed, g, concurrent):
    """Groups and evaluation rollouts come and end at random; return how many were in flight at most, and how many got in."""
    draw, spine = random.Random(seed), Spine()
    door = gate(spine, b=1000, g=g, concurrent=concurrent)
    peak = [0, 0, 0]

    def look():
        peak[0] = max(peak[0], spine.ledger.rollouts_in_flight + door.eval_in_flight)

    async def train():
        for n in range(20):
            admission = await door.admit(prompt(n))
            peak[1] += 1
            look()
            tasks.create_task(live(admission))

    async def live(admission):
        for member in range(g):
            await asyncio.sleep(draw.randint(0, 3))
            spine.record(RolloutDropped(0.0, admission.group, member, 0, "timeout", "", 0, final=True))

    async def evaluate():
        for _ in range(20):
            await door.admit_eval()
            peak[2] += 1
            look()
            tasks.create_task(one())

    async def one():
        await asyncio.sleep(draw.randint(0, 3))
        door.release_eval()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(train())
        tasks.create_task(evaluate())
    return peak


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 5))
def test_never_over_max_concurrent_and_everybody_gets_in(seed, order, g, spare):
    peak, groups, rollouts = run(_rush(seed, g, g + spare), seed=order)
    assert peak <= g + spare
    assert (groups, rollouts) == (20, 20)


@pytest.mark.parametrize("ahead", [0.0, 0.5, 2.0])
async def test_admissions_follow_the_published_version(ahead):
    spine = Spine()
    door = gate(spine, b=4, ahead=ahead)

    async def admit_for_ever():
        for n in range(10**6):
            await door.admit(prompt(n))

    async with beside(admit_for_ever()):
        for version in range(3):
            spine.publish(version)
            await turns(100)
            assert len(spine.of(Admitted)) == 4 * (version + 1) + int(4 * ahead)
            for group in list(spine.ledger.running)[:4]:
                spine.ready_now(group)
            spine.form(*list(spine.ledger.ready))
            spine.acknowledge(version)


# Places for groups that are not live --------------------------------------------------------------------------------------------------


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
