"""Batches: exactly the groups they take, oldest first, nothing without a gradient, and nothing past the bound or the lead."""

import asyncio
import math

import msgspec
import pytest
from doubles import prompt, turns
from sink_stage import B, Stage, numbers

from headway.errors import ConfigError, EnvironmentFailed
from headway.events import BatchFormed, GroupDropped, Ready, SourceExhausted
from headway.rules.batching import DYNAMIC_SAMPLING_LIMIT, MAX_REQUEUES


async def test_a_batch_is_exactly_its_groups_oldest_birth_first():
    stage = Stage(b=3)
    async with stage.running():
        stage.spine.form()  # batch 0, so that version 1 is one of the run's
        stage.spine.acknowledge(0)
        for number, birth in [(0, 1), (1, 0)]:
            await stage.give(number, birth=birth)
        assert len(stage.batches) == 0
        for number, birth in [(2, 1), (3, 0)]:
            await stage.give(number, birth=birth)
        batch = await stage.batch()
    assert (batch.k, numbers(batch)) == (1, [1, 0, 2])
    assert (batch.max_staleness, batch.on_stale, batch.temperature, batch.overlong_masked) == (2, "mask", 0.7, frozenset())
    assert list(stage.spine.ledger.ready) == [3]


async def test_a_batch_is_durable_before_it_goes_on():
    stage = Stage(commit_seconds=3.0)
    async with stage.running():
        for number in range(B):
            await stage.give(number)
        assert stage.spine.of(BatchFormed)
        await stage.batch()
        assert any(isinstance(event, BatchFormed) for event in stage.spine.journal.events)
        assert stage.spine.clock() >= 3.0


async def test_advantages_are_computed_over_all_scored_members_before_anything_is_masked():
    stage = Stage(b=1, overlong="mask")
    async with stage.running():
        group = stage.spine.finished_group(0, (0.0, 1.0, 2.0, 5.0), lost=("timeout",))
        rollouts = [msgspec.structs.replace(one, finish="length" if one.member == 3 else "stop") for one in group.rollouts]
        await stage.give_made(_with(group, rollouts))
        batch = await stage.batch()
    assert batch.groups[0].advantages == (-2.0, -1.0, 0.0, 3.0)
    assert batch.overlong_masked == {(0, 3)}
    assert stage.spine.of(BatchFormed)[0].reward_mean == 2.0


def _with(group, rollouts):
    return type(group)(group.admission, tuple(rollouts), group.lost)


@pytest.mark.parametrize(
    ("rewards", "lost", "policy", "becomes"),
    [
        ((0.0, 1.0), ("timeout",), {}, "ready"),
        ((0.0, 1.0), ("timeout",), {"whole_groups_only": True}, "incomplete"),
        ((1.0,), ("timeout",), {}, "incomplete"),
        ((0.0, 1.0, math.nan), (), {}, "ready"),
        ((0.0, 1.0, None), (), {}, "ready"),
        ((0.0, math.inf), (), {}, "incomplete"),
        ((math.nan, None), (), {}, "incomplete"),
        ((), ("timeout", "timeout"), {}, "incomplete"),
        ((1.0,), (), {}, "ready"),
        ((None,), (), {}, "incomplete"),
    ],
)
async def test_members_that_are_lost_leave_a_group_whole_partial_or_dropped(rewards, lost, policy, becomes):
    stage = Stage(**policy)
    async with stage.running():
        await stage.give(0, rewards, lost=lost)
        assert stage.causes().get(0, "ready") == becomes
        assert (0 in stage.spine.ledger.ready) == (becomes == "ready")
        assert 0 not in stage.spine.ledger.running


async def test_the_cause_of_every_lost_member_is_named():
    stage = Stage()
    async with stage.running():
        await stage.give(0, (math.nan, 1.0), lost=("timeout", "timeout"))
    (drop,) = stage.spine.of(GroupDropped)
    assert drop.detail == "lost 3 of 4 members: bad_reward, timeout"


@pytest.mark.parametrize(("overlong", "becomes"), [("keep", "ready"), ("mask", "over_length"), ("drop", "incomplete")])
async def test_a_group_whose_members_all_hit_a_limit_is_kept_masked_away_or_lost(overlong, becomes):
    stage = Stage(overlong=overlong)
    async with stage.running():
        await stage.give(0, finish="truncated")
        assert stage.causes().get(0, "ready") == becomes


async def test_a_filter_sees_the_rewards_of_the_group_and_may_refuse_it():
    seen = []

    def keep(rewards):
        seen.append(rewards)
        return rewards != [0.0, 1.0]

    stage = Stage(keep=keep)
    async with stage.running():
        await stage.give(0)
        await stage.give(1, (0.5, 1.0))
        assert (stage.causes(), list(stage.spine.ledger.ready)) == ({0: "filtered"}, [1])
    assert seen == [[0.0, 1.0], [0.5, 1.0]]


@pytest.mark.parametrize("wrong", [lambda rewards: rewards[:1], lambda rewards: rewards * math.nan, lambda rewards: 0.0])
async def test_an_advantage_function_that_answers_nonsense_is_named(wrong):
    stage = Stage(advantages=wrong)
    with pytest.raises(ConfigError, match=r"rollout.advantage: for the rewards \[0.0, 1.0\] it returned"):
        await _give_one(stage)


def broken(rewards):
    raise IndexError("no such member")


@pytest.mark.parametrize(("key", "stage"), [("rollout.filter", {"keep": broken}), ("rollout.advantage", {"advantages": broken})])
async def test_a_function_of_the_users_that_raises_is_told_in_one_line_with_its_traceback_below(key, stage):
    with pytest.raises(EnvironmentFailed, match=rf"^{key} raised IndexError for the rewards \[0.0, 1.0\]: no such member$") as caught:
        await _give_one(Stage(**stage))
    assert "in broken" in caught.value.detail


async def _give_one(stage):
    async with stage.running():
        await stage.give(0)
        await turns()


async def test_dynamic_sampling_replaces_groups_without_an_advantage_up_to_its_limit_per_batch():
    stage = Stage(most_replaced=DYNAMIC_SAMPLING_LIMIT * B)
    limit = DYNAMIC_SAMPLING_LIMIT * B
    async with stage.running():
        for number in range(limit + 1):
            await stage.give(number, (1.0, 1.0))
        assert stage.causes() == dict.fromkeys(range(limit), "zero_advantage")
        assert list(stage.spine.ledger.ready) == [limit]
        await stage.give(limit + 1)
        assert numbers(await stage.batch()) == [limit, limit + 1]
        await stage.give(limit + 2, (1.0, 1.0))  # the next batch counts anew
        assert stage.causes()[limit + 2] == "zero_advantage"


async def test_a_batch_in_which_nothing_could_move_the_policy_is_never_shipped():
    stage = Stage()
    async with stage.running():
        for number in range(B):
            await stage.give(number, (1.0, 1.0))
        assert stage.causes() == dict.fromkeys(range(B), "zero_advantage")
        assert (stage.spine.ledger.next_batch, stage.spine.ledger.ready) == (0, {})
        for number in range(B, 2 * B):
            await stage.give(number, (1.0, 1.0) if number == B else (0.0, 1.0))
        assert numbers(await stage.batch()) == [B, B + 1]
    assert all(ready.zero_advantage == (ready.group <= B) for ready in stage.spine.of(Ready))


async def test_a_batch_whose_only_advantages_are_out_of_the_loss_is_never_shipped():
    stage = Stage(b=1, overlong="mask", max_staleness=2)
    async with stage.running():
        group = stage.spine.finished_group(0, (0.0, 2.0, 1.0))
        finishes = ("length", "length", "stop")
        await stage.give_made(_with(group, [msgspec.structs.replace(o, finish=f) for o, f in zip(group.rollouts, finishes, strict=True)]))
        assert (len(stage.batches), stage.causes()) == (0, {0: "zero_advantage"})


async def _advance(stage, batches):
    """Let so many batches be formed and trained, without groups."""
    for _ in range(batches):
        k = stage.spine.ledger.next_batch
        stage.spine.form()
        stage.spine.acknowledge(k)
        stage.spine.publish(k + 1)
    await turns()


async def test_a_group_is_stale_only_when_its_newest_token_is_past_the_bound():
    stage = Stage(max_staleness=2)
    async with stage.running():
        await stage.give(0, head=0, tail=0)
        await _advance(stage, 3)
        await stage.give(1, head=0, tail=1)
        assert stage.causes() == {0: "stale"}  # 3 behind; the other's tail is 2 behind
        assert stage.requeued == [prompt(0)]
        assert stage.spine.ledger.waiting_prompts == 1
        await stage.give(2, head=3)
        assert numbers(await stage.batch()) == [1, 2]
    (drop,) = stage.spine.of(GroupDropped)
    assert drop.requeued
    assert drop.detail == "its newest token is of version 0: 3 versions old in batch 3"


async def test_a_user_who_trains_on_everything_loses_nothing_to_age():
    stage = Stage(on_stale="train", max_staleness=0)
    async with stage.running():
        await stage.give(0)
        await _advance(stage, 9)
        await stage.give(1)
        assert numbers(await stage.batch()) == [0, 1]


async def test_a_prompt_that_keeps_going_stale_is_tried_again_a_bounded_number_of_times():
    stage = Stage(b=1, max_staleness=0)
    async with stage.running():
        await _advance(stage, 1)
        for number in range(MAX_REQUEUES + 1):
            await stage.give(number, head=0, of=prompt("again"))
    drops = stage.spine.of(GroupDropped)
    assert [drop.requeued for drop in drops] == [True] * MAX_REQUEUES + [False]
    assert stage.requeued == [prompt("again")] * MAX_REQUEUES
    assert (stage.spine.ledger.requeued, stage.spine.ledger.waiting_prompts) == ({}, 0)


@pytest.mark.parametrize("lead", [0, 1, 3])
async def test_forming_never_leads_training_by_more_than_max_lead(lead):
    stage = Stage(max_lead=lead, on_stale="train")
    async with stage.running():
        for number in range(20):
            await stage.give(number)
        assert stage.spine.ledger.next_batch == lead + 1
        for trained in range(3):
            stage.spine.acknowledge(trained)
            await turns()
            assert stage.spine.ledger.next_batch == lead + trained + 2


async def test_the_time_that_a_full_batch_waits_for_the_trainer_is_counted():
    stage = Stage(max_lead=0, on_stale="train")
    async with stage.running():
        await stage.give(0)
        await asyncio.sleep(10)
        for number in range(1, 2 * B):
            await stage.give(number)
        await asyncio.sleep(5)
        assert stage.sink.parked_seconds == 5.0
        stage.spine.acknowledge(0)
        await asyncio.sleep(100)
        assert stage.sink.parked_seconds == 5.0
        assert stage.spine.ledger.next_batch == 2


async def test_groups_that_go_stale_while_a_batch_waits_are_replaced_before_it_is_formed():
    stage = Stage(max_lead=0, max_staleness=0)
    async with stage.running():
        for number in range(2 * B):
            await stage.give(number, head=0)
        assert numbers(await stage.batch()) == [0, 1]
        stage.spine.acknowledge(0)
        stage.spine.publish(1)
        await turns()
        assert stage.causes() == {2: "stale", 3: "stale"}
        for number in (4, 5):
            await stage.give(number)
        assert numbers(await stage.batch()) == [4, 5]


async def test_at_the_end_of_the_data_the_rest_makes_a_smaller_batch_and_the_output_closes():
    stage = Stage(b=3)
    async with stage.running() as (sinking, _):
        for number in range(4):
            await stage.give(number)
        await stage.give(4, (1.0,), lost=("empty_completion",))
        stage.spine.record(SourceExhausted(0.0))
        stage.groups.close()
        stage.spine.acknowledge(0)
        await sinking
        assert [numbers(batch) async for batch in stage.batches] == [[0, 1, 2], [3]]


async def test_the_end_of_the_data_waits_for_stale_prompts_to_be_tried_again():
    stage = Stage(b=2, max_staleness=0)
    async with stage.running() as (sinking, _):
        await _advance(stage, 1)
        await stage.give(0, head=0)
        await stage.give(1, head=1)
        stage.spine.record(SourceExhausted(0.0))
        await turns()
        assert (stage.causes(), len(stage.batches)) == ({0: "stale"}, 0)
        await stage.give(2, of=prompt(0))
        assert numbers(await stage.batch()) == [1, 2]
        stage.groups.close()
        await sinking


async def test_a_drain_forms_nothing_more_and_leaves_what_is_ready_in_the_journal():
    stage = Stage(max_lead=0, max_staleness=0)
    async with stage.running() as (sinking, _):
        for number in range(2 * B):
            await stage.give(number)
        assert numbers(await stage.batch()) == [0, 1]
        stage.spine.drain()
        stage.spine.acknowledge(0)
        stage.spine.publish(1)  # 2 and 3 are stale now, and it is not the drain's business
        stage.groups.close()
        await sinking
        assert [batch async for batch in stage.batches] == []
    assert list(stage.spine.ledger.ready) == [2, 3]
    assert stage.spine.of(GroupDropped) == []


async def test_no_batch_is_formed_beyond_the_last_step_and_later_groups_still_have_their_ending():
    stage = Stage(b=1, steps=2, max_lead=9)
    async with stage.running() as (sinking, _):
        for number in range(3):
            await stage.give(number)
        await stage.give(3, (1.0,), lost=("timeout",))
        stage.groups.close()
        await sinking
        assert [numbers(batch) async for batch in stage.batches] == [[0], [1]]
    assert (list(stage.spine.ledger.ready), stage.causes()) == ([2], {3: "incomplete"})


@pytest.mark.parametrize("apart", [True, False])
async def test_scores_that_a_scorer_gave_are_recorded_where_the_group_becomes_ready(apart):
    stage = Stage(scored_apart=apart)
    async with stage.running():
        await stage.give(0, (0.25, 1.0))
    assert stage.spine.of(Ready)[0].scores == (((0, 0.25), (1, 1.0)) if apart else ())
