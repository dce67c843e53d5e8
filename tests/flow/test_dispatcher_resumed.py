"""Groups that were in flight when an earlier process ended go on: first, with their finished members, each with exactly one ending."""

import asyncio
import random
from collections import Counter

import pytest
from dispatcher_stage import Stage
from doubles import Spine, failure, prompt, rollout, turns
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.events import Continued, GroupDropped, PromptDropped, Resumed, RolloutDropped
from headway.sim.loop import run
from headway.types import Admission, ContinuedGroup, FinishedGroup


def interrupted(spine, *groups, members=3):
    """Let groups be in flight when the process ends, each with (finished members, {lost member: cause}); return what goes on."""
    admissions = []
    for number, (finished, lost) in enumerate(groups):
        admissions.append(admission := spine.admit(number, members))
        for member in finished:
            spine.end(admission, member)
        for member, cause in lost.items():
            spine.record(RolloutDropped(0.0, number, member, 0, cause, "", 0, final=True))
    spine.record(Resumed(0.0, 0, 0, "line"))
    spine.publish(0)
    for admission in admissions:
        spine.record(Continued(0.0, admission.group))
    return [
        ContinuedGroup(admission, tuple(rollout(admission.group, member) for member in finished), lost)
        for admission, (finished, lost) in zip(admissions, groups, strict=True)
    ]


class Everything(Stage):
    """A stage whose `collect` does not look for rollouts of an earlier process in this one's journal."""

    async def collect(self):
        async for group in self.finished:
            self.arrived.append(group)


async def test_a_group_goes_on_with_its_finished_members_and_only_the_others_start_again():
    spine = Spine()
    stage = Everything(spine, {}, groups=0, continued=interrupted(spine, ([2, 0], {})))
    assert spine.ledger.rollouts_in_flight == 1
    await stage.play()
    assert stage.started == [(0, 1)]
    (group,) = stage.arrived
    assert group == FinishedGroup(Admission(0, prompt(0), 3, 0), group.rollouts, ())
    assert [one.member for one in group.rollouts] == [0, 1, 2]
    assert spine.ledger.rollouts_in_flight == 0


async def test_members_that_were_lost_for_good_stay_lost():
    spine = Spine()
    stage = Everything(spine, {}, groups=0, continued=interrupted(spine, ([1], {2: "timeout"})))
    await stage.play()
    assert stage.started == [(0, 0)]
    assert [(one.lost, len(one.rollouts)) for one in stage.arrived] == [(("timeout",), 2)]


async def test_one_whose_members_have_all_ended_is_handed_on_and_one_beyond_hope_is_dropped_and_tried_again():
    spine = Spine()
    continued = interrupted(spine, ([0, 1, 2], {}), ([0], {1: "timeout", 2: "engine_error"}))
    stage = Everything(spine, {}, groups=0, continued=continued)
    await stage.play()
    assert (stage.started, [one.admission.group for one in stage.arrived]) == ([], [0])
    (drop,) = spine.of(GroupDropped)
    assert (drop.group, drop.cause, drop.requeued, drop.detail) == (1, "incomplete", True, "lost 2 of 3 members; the last: engine_error")
    assert spine.requeued == [prompt(1)]


async def test_what_was_in_flight_goes_before_new_groups_and_is_admitted_no_second_time():
    spine = Spine()
    stage = Everything(spine, {}, groups=2, members=3, continued=interrupted(spine, ([0], {}), ([1], {})))
    await stage.play()
    assert stage.started[:4] == [(0, 1), (0, 2), (1, 0), (1, 2)]
    assert spine.ledger.admitted == 4
    assert spine.ledger.resume_budget.admitted == 2


async def test_complete_groups_without_a_score_are_handed_on_even_through_a_full_channel():
    spine = Spine()
    unscored = [spine.finished_group(number) for number in range(5)]
    stage = Everything(spine, {}, groups=1, capacity=1, unscored=unscored)
    await stage.play()
    assert stage.arrived[:5] == unscored
    assert len(stage.arrived) == 6


async def test_a_group_that_is_stopped_before_it_could_go_on_does_not_start():
    spine = Spine()
    stage = Everything(spine, {}, groups=0, continued=interrupted(spine, ([0], {}), ([1], {})))
    assert stage.dispatcher.cancel(0) == prompt(0)
    spine.drop(0, "stale", requeued=True)
    await stage.play()
    assert stage.started == [(1, 0), (1, 2)]
    assert [one.admission.group for one in stage.arrived] == [1]


async def test_one_that_goes_on_can_be_stopped_as_any_other():
    spine = Spine()
    stage = Everything(spine, {(0, 1): (100.0, None), (0, 2): (100.0, None)}, groups=0, continued=interrupted(spine, ([0], {})))
    asyncio.get_running_loop().call_at(5.0, stage.dispatcher.cancel_all, "late")
    await stage.play()
    assert stage.cancelled == [(0, 1), (0, 2)]
    assert [(drop.cause, drop.requeued, drop.sampled_tokens) for drop in spine.of(GroupDropped)] == [("cancelled", True, 5)]


async def test_where_fewer_may_run_now_than_did_members_go_on_as_others_end():
    spine = Spine()
    stage = Everything(spine, {}, groups=0, most=2, continued=interrupted(spine, *[([0], {})] * 3))
    playing = asyncio.ensure_future(stage.play())
    for seconds in range(1, 4):
        await asyncio.sleep(0.5)
        assert len(stage.started) == 2 * seconds
        await asyncio.sleep(0.5)
    await playing
    assert len(stage.arrived) == 3


@pytest.mark.parametrize("cause", ["environment_error", "timeout"])
async def test_a_prompt_whose_groups_keep_failing_is_quarantined_after_so_many_and_not_before(cause):
    spine = Spine(max_prompt_failures=2)
    script = {(group, member): (1.0, failure(cause)) for group in range(2) for member in range(2)}
    for tried in range(2):
        stage = Stage(spine, {key: value for key, value in script.items() if key[0] == tried}, groups=1)
        await stage.play()
        assert [drop.requeued for drop in spine.of(GroupDropped)] == [True, False][: tried + 1]
    (given_up,) = spine.of(PromptDropped)
    assert (given_up.prompt_id, given_up.cause, given_up.failures) == ("p0", "quarantined", 2)
    assert given_up.detail == f"2 groups of it in a row lost too many members, the last of 2 to {cause}"
    assert spine.ledger.quarantined == {"p0": given_up.detail}


async def _turmoil(seed):
    draw = random.Random(seed)
    spine = Spine(commit_seconds=draw.choice([0.0, 0.5]))
    ends = [draw.sample(range(3), draw.randint(1, 3)) for _ in range(draw.randint(1, 6))]
    lost = [{member: "timeout" for member in range(3) if member not in end and draw.random() < 0.3} for end in ends]
    continued = interrupted(spine, *zip(ends, lost, strict=True))
    causes = [failure("timeout"), failure("bad_reward", retryable=False), None, None, None]
    script = {(group, member): (draw.randint(0, 9), draw.choice(causes)) for group in range(9) for member in range(3)}
    stage = Everything(spine, script, groups=3, members=3, capacity=draw.randint(1, 3), continued=continued)
    for _ in range(draw.randint(0, 2)):
        asyncio.get_running_loop().call_at(draw.randint(0, 12), _stop, stage, draw.randrange(9))
    await stage.play()
    await turns()
    return stage, ends, lost


def _stop(stage, group):
    if stage.dispatcher.cancel(group) is not None:
        stage.spine.drop(group, "stale")


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_no_member_that_had_ended_starts_again_and_every_group_has_exactly_one_ending(seed, order):
    stage, ends, lost = run(_turmoil(seed), seed=order)
    over = {(group, member) for group, ended in enumerate(ends) for member in [*ended, *lost[group]]}
    assert over.isdisjoint(stage.started)
    endings = Counter([group.admission.group for group in stage.arrived] + [drop.group for drop in stage.spine.of(GroupDropped)])
    assert endings == Counter(range(stage.spine.ledger.next_group))
    assert stage.spine.ledger.rollouts_in_flight == 0
    assert all(len(group.rollouts) + len(group.lost) == 3 for group in stage.arrived)
