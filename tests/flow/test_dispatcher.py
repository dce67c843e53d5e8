"""Every admitted group has exactly one ending, and what finished is durable before anyone counts on it."""

import asyncio
import random
from collections import Counter

import pytest
from dispatcher_stage import Stage
from doubles import Spine, beside, failure, prompt, turns
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import WorkerFailed
from headway.events import Finished, GroupDropped, RolloutDropped
from headway.sim.loop import run


async def test_a_group_goes_on_once_all_its_members_have_ended_in_order_of_members():
    stage = Stage(Spine(), {(0, 0): (5.0, None), (0, 1): (1.0, None), (0, 2): (3.0, failure("timeout"))}, groups=1, members=3)
    await stage.play()
    (group,) = stage.arrived
    assert [one.member for one in group.rollouts] == [0, 1]
    assert group.lost == ("timeout",)
    assert stage.spine.clock() == 5.0


async def test_what_finished_is_durable_before_its_group_goes_on():
    stage = Stage(Spine(commit_seconds=2.0), {}, groups=3)
    await stage.play()  # `collect` looks into the journal
    assert len(stage.arrived) == 3


async def test_attempts_that_are_retried_are_recorded_and_the_last_one_ends_the_member():
    result = [failure("engine_error"), failure(), failure("worker_died", detail="gone")]
    stage = Stage(Spine(), {(0, 0): (1.0, result)}, groups=1, members=3)
    await stage.play()
    drops = stage.spine.of(RolloutDropped)
    assert [(drop.attempt, drop.cause, drop.final) for drop in drops] == [
        (0, "engine_error", False),
        (1, "environment_error", False),
        (2, "worker_died", True),
    ]
    assert drops[-1].detail == "gone"


@pytest.mark.parametrize(("members", "whole", "lost"), [(2, False, 1), (4, False, 3), (4, True, 1), (1, False, 1)])
async def test_a_group_that_is_doomed_is_dropped_at_once_and_the_others_are_cancelled(members, whole, lost):
    script = {(0, member): (1.0 + member, failure("timeout")) for member in range(lost)}
    script |= {(0, member): (1000.0, None) for member in range(lost, members)}
    stage = Stage(Spine(), script, groups=1, members=members, whole_groups_only=whole)
    await stage.play()
    assert stage.arrived == []
    (drop,) = stage.spine.of(GroupDropped)
    assert (drop.group, drop.cause, drop.requeued) == (0, "incomplete", True)
    assert stage.spine.requeued == [prompt(0)]
    assert drop.detail == f"lost {lost} of {members} members; the last: timeout"
    assert stage.cancelled == [(0, member) for member in range(lost, members)]
    assert stage.spine.clock() == float(lost)
    assert (stage.spine.ledger.running, stage.spine.ledger.rollouts_in_flight) == ({}, 0)


async def test_a_member_that_is_being_committed_when_its_group_is_dropped_changes_nothing_afterwards():
    stage = Stage(Spine(commit_seconds=5.0), {(0, 0): (1.0, None), (0, 1): (2.0, failure("timeout"))}, groups=1)
    await stage.play()
    assert stage.arrived == []
    assert [type(event) for event in stage.spine.journal.events[-3:]] == [Finished, RolloutDropped, GroupDropped]
    assert stage.spine.ledger.rollouts_in_flight == 0


async def test_the_end_of_the_prompts_lets_what_runs_finish_and_then_closes():
    stage = Stage(Spine(), {}, groups=5)
    await stage.play()
    assert len(stage.arrived) == 5


async def test_a_drain_lets_what_runs_finish_and_starts_nothing_more():
    stage = Stage(Spine(), {}, groups=50, limit=2)
    asyncio.get_running_loop().call_at(2.5, stage.spine.drain)
    await stage.play()
    assert len(stage.arrived) == 6
    assert stage.spine.clock() == 3.0


async def test_cancel_all_ends_every_group_in_flight_as_cancelled_and_keeps_what_is_finished():
    stage = Stage(Spine(), {(0, 0): (1.0, None), (0, 1): (1000.0, None), (1, 0): (900.0, None), (1, 1): (900.0, None)}, groups=2)
    asyncio.get_running_loop().call_at(5.0, stage.dispatcher.cancel_all, "still running 5 s into the drain")
    await stage.play()
    assert [(drop.group, drop.cause, drop.sampled_tokens) for drop in stage.spine.of(GroupDropped)] == [
        (0, "cancelled", 5),
        (1, "cancelled", 0),
    ]
    assert stage.spine.of(GroupDropped)[0].detail == "still running 5 s into the drain"
    assert stage.spine.clock() == 5.0
    assert sum(isinstance(event, Finished) for event in stage.spine.journal.events) == 1
    assert stage.arrived == []


async def test_what_is_left_to_a_later_process_stops_now_and_stays_in_flight_in_the_journal():
    stage = Stage(Spine(), {(0, 0): (1.0, None), (0, 1): (1000.0, None), (1, 0): (900.0, None), (1, 1): (900.0, None)}, groups=2)
    asyncio.get_running_loop().call_at(5.0, stage.dispatcher.leave_all)
    await stage.play()
    assert stage.spine.clock() == 5.0
    assert stage.spine.of(GroupDropped) == []
    assert (list(stage.spine.ledger.running), stage.spine.ledger.rollouts_in_flight) == ([0, 1], 3)
    assert sorted(stage.cancelled) == [(0, 1), (1, 0), (1, 1)]


async def test_cancel_all_does_not_touch_a_group_that_has_gone_on():
    stage = Stage(Spine(), {}, groups=3, capacity=1)
    playing = asyncio.ensure_future(_without_collecting(stage))
    await asyncio.sleep(2)
    stage.dispatcher.cancel_all("late")
    async with beside(stage.collect()) as (collecting,):
        await playing
        await collecting
    assert len(stage.arrived) == 3
    assert stage.spine.of(GroupDropped) == []


async def _without_collecting(stage):
    async with beside(stage.spine.recorder.run()):
        await stage.dispatcher.run()


async def test_an_error_in_a_rollout_travels_and_the_output_is_not_closed_as_if_it_had_ended():
    stage = Stage(Spine(), {(1, 0): (1.0, WorkerFailed("the worker is gone"))}, groups=3)
    with pytest.raises(WorkerFailed, match="the worker is gone"):
        await stage.play()
    await stage.finished.send(None)  # an open channel takes it


async def test_a_full_output_holds_groups_back_and_loses_none():
    stage = Stage(Spine(), {}, groups=20, capacity=1)
    await stage.play()
    assert sorted(group.admission.group for group in stage.arrived) == list(range(20))


async def _turmoil(seed):
    draw = random.Random(seed)
    members, groups = draw.randint(1, 4), draw.randint(1, 8)
    causes = [failure("timeout"), failure("bad_reward", retryable=False), [failure(), failure()], None, None, None]
    script = {(group, member): (draw.randint(0, 9), draw.choice(causes)) for group in range(groups) for member in range(members)}
    stage = Stage(
        Spine(commit_seconds=draw.choice([0.0, 0.5])),
        script,
        groups=groups,
        members=members,
        capacity=draw.randint(1, 3),
        whole_groups_only=draw.random() < 0.3,
        limit=draw.randint(1, 4),
    )
    if draw.random() < 0.5:
        asyncio.get_running_loop().call_at(draw.randint(0, 12), stage.spine.drain)
    if draw.random() < 0.5:
        asyncio.get_running_loop().call_at(draw.randint(0, 12), stage.dispatcher.cancel_all, "random")
    await stage.play()
    await turns()
    return stage


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_every_admitted_group_has_exactly_one_ending_and_nothing_stays_reserved(seed, order):
    stage = run(_turmoil(seed), seed=order)
    endings = Counter([group.admission.group for group in stage.arrived] + [drop.group for drop in stage.spine.of(GroupDropped)])
    assert endings == Counter(range(stage.spine.ledger.next_group))
    assert (stage.spine.ledger.running, stage.spine.ledger.rollouts_in_flight) == ({}, 0)
    assert all(len(group.rollouts) + len(group.lost) == stage.members for group in stage.arrived)
    ended = Counter((e.group, e.member) for e in stage.spine.journal.events if isinstance(e, Finished) or getattr(e, "final", False))
    assert set(ended.values()) <= {1}
