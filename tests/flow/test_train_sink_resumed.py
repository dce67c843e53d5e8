"""A sink that begins with groups: they train as any others; payloads left on disk are in the batch; who failed is tried again."""

import asyncio

import msgspec
import pytest
from doubles import Spine, prompt, rollout, turns
from sink_stage import Stage, numbers

from headway.errors import StorageError
from headway.events import BatchFormed, GroupDropped, Ingested, PromptDropped, Ready, Resumed
from headway.types import Admission, PayloadReference, Prompt, ReadyGroup


def stub(group, member, **more):
    return msgspec.structs.replace(rollout(group, member, **more), reference=PayloadReference(1, group, 6, 0))


def kept(spine, *groups):
    """Let a process end with these groups complete; return them as the next begins with them, payloads left on disk."""
    admissions = [spine.ready_group(number) for number in groups]
    spine.record(Resumed(0.0, 0, 0, "line"))
    spine.publish(0)
    return [ReadyGroup(one, tuple(stub(one.group, n, reward=float(n)) for n in range(2)), (-0.5, 0.5)) for one in admissions]


async def load(groups):
    """Load payloads that say whose they are; it takes a second."""
    await asyncio.sleep(1.0)
    return tuple(
        ReadyGroup(
            group.admission,
            tuple(msgspec.structs.replace(one, payload=f"{one.group}.{one.member}".encode()) for one in group.rollouts),
            group.advantages,
        )
        for group in groups
    )


async def test_groups_that_a_run_begins_with_train_with_their_advantages_and_their_payloads_from_disk():
    spine = Spine()
    stage = Stage(spine=spine, load=load, ready=kept(spine, 0, 1))
    async with stage.running():
        batch = await stage.batch()
    assert numbers(batch) == [0, 1]
    assert [group.advantages for group in batch.groups] == [(-0.5, 0.5)] * 2
    assert [one.payload for group in batch.groups for one in group.rollouts] == [b"0.0", b"0.1", b"1.0", b"1.1"]
    assert len(spine.of(Ready)) == 2, "they were ready before"


async def test_a_full_ready_set_makes_batch_after_batch_as_the_trainer_takes_them():
    spine = Spine()
    stage = Stage(spine=spine, load=load, ready=kept(spine, *range(8)), on_stale="train")
    async with stage.running():
        for k in range(4):
            assert numbers(await stage.batch()) == [2 * k, 2 * k + 1]
            spine.acknowledge(k)


async def test_a_group_that_went_stale_meanwhile_is_dropped_and_its_prompt_tried_again():
    spine = Spine()
    ready = kept(spine, 0)
    for k in range(3):
        spine.form()
        spine.acknowledge(k)
    stage = Stage(spine=spine, ready=ready)
    async with stage.running():
        await stage.give(1, head=3)
        await stage.give(2, head=3)
        await stage.batch()
    assert stage.causes() == {0: "stale"}
    assert stage.requeued == [prompt(0)]


async def test_a_place_that_was_kept_is_filled_from_disk_too():
    spine = Spine()
    spine.record(Ingested(0.0, 0, "posted", "external", 2, 0))
    spine.ready_now(0)
    spine.record(Resumed(0.0, 0, 0, "line"))
    theirs = ReadyGroup(
        Admission(0, Prompt("posted", 0, {}), 2, -1), tuple(stub(0, n, reward=float(n), head=-1) for n in range(2)), (-0.5, 0.5)
    )
    stage = Stage(spine=spine, load=load, ready=[theirs])
    async with stage.running():
        await stage.give(1)
        batch = await stage.batch()
    assert numbers(batch) == [0, 1]
    assert [one.payload for one in batch.groups[0].rollouts] == [b"0.0", b"0.1"]


async def test_payloads_are_loaded_for_no_more_batches_than_may_lead_training():
    spine = Spine()
    loads = []

    async def counted(groups):
        loads.append(len(groups))
        return await load(groups)

    stage = Stage(spine=spine, load=counted, ready=kept(spine, *range(12)), on_stale="train", max_lead=1)
    async with stage.running():
        await asyncio.sleep(60)
        assert loads == [2, 2]
        spine.acknowledge(0)
        await asyncio.sleep(60)
        assert loads == [2, 2, 2]


async def test_a_payload_that_cannot_be_read_ends_the_run_and_nothing_is_shipped():
    async def fails(groups):
        raise StorageError("the record of group 0, member 0 cannot be read again: the segment is damaged")

    spine = Spine()
    stage = Stage(spine=spine, load=fails, ready=kept(spine, 0, 1))
    with pytest.raises(StorageError, match="the record of group 0, member 0"):
        async with stage.running():
            await asyncio.sleep(1)
    assert len(stage.batches) == 0


async def test_what_a_scorer_said_is_told_with_its_parts():
    stage = Stage(scored_apart=True)
    async with stage.running():
        group = stage.spine.finished_group(0, (0.25, 0.75))
        parts = [msgspec.structs.replace(group.rollouts[0], rewards={"style": 0.5, "format": 1.0}), group.rollouts[1]]
        await stage.give_made(type(group)(group.admission, tuple(parts), ()))
    (told,) = stage.spine.of(Ready)
    assert (told.scores, told.score_parts) == (((0, 0.25), (1, 0.75)), ((0, {"style": 0.5, "format": 1.0}),))


@pytest.mark.parametrize(("lost", "again"), [("timeout", True), ("score_error", True), ("length_mismatch", False)])
async def test_a_group_that_lost_too_many_is_tried_again_when_infrastructure_did_it(lost, again):
    stage = Stage()
    async with stage.running():
        await stage.give(0, (1.0,), lost=(lost,))
    (drop,) = stage.spine.of(GroupDropped)
    assert (drop.cause, drop.requeued, stage.requeued) == ("incomplete", again, [prompt(0)] * again)
    assert stage.spine.ledger.failures == {"p0": 1}


async def test_a_prompt_is_quarantined_when_its_groups_keep_failing_and_a_good_one_in_between_starts_the_count_anew():
    spine = Spine(max_prompt_failures=2)
    stage = Stage(spine=spine)
    async with stage.running():
        await stage.give(0, (1.0,), lost=("timeout",), of=prompt("poison"))
        await stage.give(1, (0.0, 1.0), of=prompt("poison"))
        await stage.give(2, (1.0,), lost=("timeout",), of=prompt("poison"))
        assert spine.of(PromptDropped) == []
        await stage.give(3, (1.0,), lost=("timeout",), of=prompt("poison"))
    (gone,) = spine.of(PromptDropped)
    assert (gone.prompt_id, gone.cause, gone.failures) == ("ppoison", "quarantined", 2)
    assert [drop.requeued for drop in spine.of(GroupDropped)] == [True, True, False]


async def test_who_was_cancelled_with_a_drain_is_no_failure_and_waits_for_the_next_process():
    stage = Stage()
    async with stage.running():
        await stage.give(0, (), lost=("cancelled", "cancelled"))
        await turns()
    (drop,) = stage.spine.of(GroupDropped)
    assert (drop.cause, drop.requeued) == ("cancelled", True)
    assert (stage.spine.ledger.failures, list(stage.spine.ledger.waiting)) == ({}, [("p0", 0)])


async def test_a_group_from_elsewhere_that_is_incomplete_has_no_prompt_to_try_again():
    stage = Stage()
    async with stage.running():
        stage.spine.record(Ingested(0.0, 0, "posted", "external", 2, 0))
        broken = stage.spine.finished_group(1, (float("nan"), float("nan")))
        stage.sink.take_ingested(type(broken)(Admission(0, Prompt("posted", 0, {}), 2, -1), broken.rollouts, ()))
    assert [(drop.group, drop.cause, drop.requeued) for drop in stage.spine.of(GroupDropped)] == [(0, "incomplete", False)]
    assert (stage.requeued, stage.spine.of(PromptDropped), stage.spine.of(BatchFormed)) == ([], [], [])
