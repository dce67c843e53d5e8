"""The gate: reserved before it returns, never over a limit, each side in its turn, and a drain ends the wait."""

import asyncio
import random

import pytest
from doubles import Spine, beside, prompt, turns
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import BoundBreached
from headway.events import Admitted, Resumed, RolloutDropped
from headway.flow.gate import CapacityGate
from headway.rules.admission import GateLimits
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


def resumed(*, ready=0, version=5):
    """Return a spine whose run was taken up at `version`, with so many complete groups."""
    spine = Spine(published=False)
    spine.publish(0)
    for k in range(version):
        spine.form()
        spine.acknowledge(k)
        spine.publish(k + 1)
    for group in range(ready):
        spine.ready_group(group)
    spine.record(Resumed(0.0, version, version, "line"))
    spine.publish(version)
    return spine


async def _admit_all(spine, door):
    """Admit until the gate closes, and return how many."""
    waiting = [background(door.admit(prompt(n))) for n in range(50)]
    await turns()
    count = sum(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await turns()
    return count


@pytest.mark.parametrize("ready", [0, 3, 6, 9])
async def test_a_resumed_run_admits_what_its_live_sets_leave_and_the_second_lock_agrees(ready):
    spine = resumed(ready=ready)
    assert await _admit_all(spine, gate(spine, b=2, ahead=2.0, max_staleness=2)) == max(0, 6 - ready)
    assert spine.ledger.resume_budget.admitted == max(0, 6 - ready)


async def test_when_the_live_sets_are_wrong_the_second_lock_of_a_resumed_run_stops_it_before_anything_is_recorded():
    spine = resumed()
    door = gate(spine, b=2, ahead=1.0, max_staleness=1)
    assert await _admit_all(spine, door) == 4
    spine.ledger.running.clear()  # as if a ledger had forgotten what runs: the resume trap
    before = spine.ledger.admitted
    with pytest.raises(BoundBreached) as error:
        await door.admit(prompt())
    assert spine.ledger.admitted == before
    assert str(error.value) == (
        "another group would start, against the bound on a resumed run: the run was taken up at version 5 with batch 5 next: 4 groups were "
        "admitted since (less those dropped), and batches to 6 have room for 4"
    )


async def test_the_second_lock_counts_drops_back_and_ends_with_the_first_new_version():
    spine = resumed()
    door = gate(spine, b=1, ahead=1.0, max_staleness=1)
    assert await _admit_all(spine, door) == 2
    spine.drop(0, "filtered")
    assert await _admit_all(spine, door) == 1
    assert spine.ledger.resume_budget.admitted == 2
    spine.ready_now(1)
    spine.form(1)
    spine.acknowledge(5)
    spine.publish(6)
    assert spine.ledger.resume_budget is None
    assert await _admit_all(spine, door) == 1


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
