"""wait, drop and ship in the train sink: what is formed, what waits, what is cancelled, and where its prompt goes."""

import pytest
from doubles import prompt, turns
from sink_stage import Stage, numbers

from headway.events import GroupDropped, Ingested
from headway.rules.batching import MAX_REQUEUES
from headway.types import Admission, FinishedGroup, Prompt


def start(stage, *groups, birth=None):
    """Admit groups that keep running, as the dispatcher would know them."""
    for number in groups:
        stage.dispatched[number] = stage.spine.admit(number, birth=birth).prompt


async def test_wait_holds_a_batch_until_nobody_left_can_become_too_old():
    stage = Stage(on_stale="wait", max_staleness=1, b=1)
    async with stage.running():
        slow = stage.spine.finished_group(0)  # still on its way here
        await stage.give(1)
        assert numbers(await stage.batch()) == [1]
        stage.spine.acknowledge(0)
        stage.spine.publish(1)
        await stage.give(2)
        assert len(stage.batches) == 0  # batch 1 is the last that group 0 may be in
        await stage.give_made(slow)
        assert numbers(await stage.batch()) == [0]
        stage.spine.acknowledge(1)
        stage.spine.publish(2)
        assert numbers(await stage.batch()) == [2]
    assert stage.causes() == {}


async def test_wait_forms_at_once_when_later_batches_have_room_in_time():
    stage = Stage(on_stale="wait", max_staleness=1, b=2)
    async with stage.running():
        start(stage, 0, 1)
        for number in (2, 3):
            await stage.give(number)
        assert numbers(await stage.batch()) == [2, 3]  # 0 and 1 fit into batch 1, which is in time
        for number in (4, 5):
            await stage.give(number)
        assert len(stage.batches) == 0  # batch 1 is the last for 0 and 1
        assert stage.causes() == {}


async def test_drop_cancels_the_fewest_that_are_in_the_way_and_sends_their_prompts_back():
    stage = Stage(on_stale="drop", max_staleness=1, b=2)
    async with stage.running():
        start(stage, 0, 1, 2)
        stage.spine.end(Admission(0, prompt(0), 2, 0), 0)  # has generated: the last to be lost
        for number in (3, 4):
            await stage.give(number)
        assert numbers(await stage.batch()) == [3, 4]
    (drop,) = stage.spine.of(GroupDropped)  # batch 1 has room for two of the three
    assert (drop.group, drop.cause, drop.requeued) == (2, "stale", True)
    assert drop.detail == "born at version 0: it would be more than 1 versions old"
    assert stage.requeued == [prompt(2)]
    assert sorted(stage.spine.ledger.running) == [0, 1]
    assert 2 not in stage.dispatched


async def test_a_group_that_is_dropped_while_it_is_scored_sends_its_prompt_back_when_it_arrives():
    stage = Stage(on_stale="drop", max_staleness=0, b=2)
    async with stage.running():
        late = stage.spine.finished_group(0)  # its members have ended: the dispatcher has handed it on
        for number in (1, 2):
            await stage.give(number)
        assert numbers(await stage.batch()) == [1, 2]
        assert stage.causes() == {0: "stale"}
        assert (stage.requeued, stage.spine.ledger.waiting_prompts) == ([], 1)
        await stage.give_made(late)
        assert stage.requeued == [prompt(0)]
        assert not stage.spine.ledger.ready
    (drop,) = stage.spine.of(GroupDropped)
    assert drop.sampled_tokens == 10  # of its finished members, nothing of which trains


async def test_a_prompt_is_dropped_a_bounded_number_of_times():
    stage = Stage(on_stale="drop", max_staleness=0, b=1)
    async with stage.running():
        for attempt in range(MAX_REQUEUES + 1):
            number = 2 * attempt
            stage.dispatched[number] = stage.spine.admit(number, of=prompt("slow")).prompt
            await stage.give(number + 1)
            await stage.batch()
            stage.spine.acknowledge(attempt)
            stage.spine.publish(attempt + 1)
            await turns()
    drops = stage.spine.of(GroupDropped)
    assert [drop.requeued for drop in drops] == [True] * MAX_REQUEUES + [False]
    assert stage.requeued == [prompt("slow")] * MAX_REQUEUES


async def test_a_group_that_is_dropped_for_the_last_time_while_it_is_scored_leaves_its_prompt_behind():
    stage, late = Stage(on_stale="drop", max_staleness=0, b=1), []
    async with stage.running():
        for attempt in range(MAX_REQUEUES + 1):
            late.append(stage.spine.finished_group(2 * attempt, of=prompt("slow")))  # the dispatcher has handed it on
            await stage.give(2 * attempt + 1)
            await stage.batch()
            stage.spine.acknowledge(attempt)
            stage.spine.publish(attempt + 1)
            await stage.give_made(late[-1])
        assert stage.requeued == [prompt("slow")] * MAX_REQUEUES
        assert not stage.spine.ledger.waiting
        assert not stage.spine.ledger.ready


async def test_drop_at_the_ship_side_drops_everything_that_is_past_its_deadline_ready_or_not():
    stage = Stage(on_stale="drop", enforce="ship", max_staleness=0, b=2, max_lead=0)
    async with stage.running():
        for number in range(4):
            await stage.give(number)
        start(stage, 9)
        assert numbers(await stage.batch()) == [0, 1]  # nothing is past its deadline yet: no look ahead
        assert stage.causes() == {}
        stage.spine.acknowledge(0)
        stage.spine.publish(1)
        await turns()
        assert stage.causes() == {2: "stale", 3: "stale", 9: "stale"}
        assert stage.requeued == [prompt(2), prompt(3), prompt(9)]


async def test_a_group_from_elsewhere_is_in_the_batch_that_it_was_promised_to_and_lowers_what_live_ones_it_takes():
    stage = Stage(b=2, replayed_groups=1)
    async with stage.running():
        stage.spine.record(Ingested(0.0, 0, "old", "replay", 2, 0))
        await stage.give(1)
        assert len(stage.batches) == 0  # not durable yet
        made = stage.spine.finished_group(7)  # only to have rollouts to copy
        stage.spine.drop(7)
        stage.sink.take_ingested(FinishedGroup(Admission(0, Prompt("old", 0, {}), 2, -1), made.rollouts, ()))
        assert numbers(await stage.batch()) == [0, 1]


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
async def test_nothing_is_dropped_as_stale_by_its_tokens_where_groups_are_kept_within_the_bound(on_stale):
    """A token that is too old there is a breach, to be found by the double lock, and not something to clear away."""
    stage = Stage(on_stale=on_stale, max_staleness=0, b=1)
    async with stage.running():
        await stage.give(0, head=-5, tail=-5)
        assert numbers(await stage.batch()) == [0]
    assert stage.causes() == {}


async def test_code_of_the_users_that_fails_for_rewards_somebody_sent_costs_that_group_and_not_the_run():
    def for_two(rewards):
        return rewards - rewards[1]

    stage = Stage(b=2, replayed_groups=1, advantages=for_two)
    async with stage.running():
        stage.spine.record(Ingested(0.0, 0, "short", "external", 1, 0))
        made = stage.spine.finished_group(7, (1.0,))
        stage.spine.drop(7)
        stage.sink.take_ingested(FinishedGroup(Admission(0, Prompt("short", 0, {}), 1, -1), made.rollouts, ()))
        assert stage.causes()[0] == "score_error"
        assert not stage.spine.ledger.promised  # its place is a live group's again
        for number in (8, 9):
            await stage.give(number)
        assert numbers(await stage.batch()) == [8, 9]
