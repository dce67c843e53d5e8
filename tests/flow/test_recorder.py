"""One ledger, one journal, one order: what counts is what is written, and a commit counts only once it is."""

import asyncio
import random

import msgspec
import pytest
from doubles import Spine, beside, rollout, together, turns
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import StorageError
from headway.events import Admitted, Finished, GroupDropped, Published, Ready
from headway.flow.recorder import WRITE_BYTES, Recorder
from headway.rules.ledger import Ledger, apply
from headway.sim.loop import run


def admitted(group):
    return Admitted(0.0, group, f"p{group}", 0, 2, 0)


def finished(group, member=0):
    return Finished(0.0, group, member, 0, 1.0, 8, 5, 0, 0)


async def test_what_is_recorded_applies_at_once_and_is_written_behind_in_order():
    spine = Spine(commit_seconds=1.0)
    async with beside(spine.recorder.run()):
        spine.admit(0)
        spine.publish(1)
        assert list(spine.ledger.running) == [0]
        assert spine.journal.events == []
        await spine.recorder.flush()
        assert spine.journal.events == spine.events


async def test_a_commit_is_applied_once_it_is_durable_and_not_before():
    spine = Spine(commit_seconds=1.0)
    spine.admit(0)
    commit = asyncio.ensure_future(spine.recorder.commit(finished(0), rollout(0)))
    await turns()
    async with beside(spine.recorder.run()):
        await asyncio.sleep(0.9)
        assert spine.ledger.rollouts_in_flight == 2
        written = await commit
        assert spine.clock() == 1.0
        assert spine.ledger.rollouts_in_flight == 1
        assert written == spine.journal.events[-1] == msgspec.structs.replace(finished(0), reference=written.reference)
        assert written.reference is not None
        assert await spine.journal.read(written.reference) == rollout(0)


async def test_one_write_holds_no_more_bytes_than_a_copy_may_cost_and_a_flush_waits_for_all_of_them():
    spine = Spine(commit_seconds=1.0)
    for group in range(3):
        spine.admit(group)
    large = [msgspec.structs.replace(rollout(group), payload=bytes(WRITE_BYTES)) for group in range(3)]
    commits = [asyncio.ensure_future(spine.recorder.commit(finished(group), large[group])) for group in range(3)]
    await turns()
    flushed = asyncio.ensure_future(spine.recorder.flush())
    await turns()
    async with beside(spine.recorder.run()):
        await commits[1]
        assert (spine.clock(), commits[2].done(), flushed.done()) == (1.0, False, False)
        await flushed
        assert (spine.clock(), commits[2].done(), spine.ledger.rollouts_in_flight) == (2.0, True, 3)


async def test_commits_that_come_during_a_write_are_written_together():
    spine = Spine(commit_seconds=1.0)
    async with beside(spine.recorder.run()):
        for group in range(50):
            spine.admit(group)
        await asyncio.gather(*(spine.recorder.commit(finished(group)) for group in range(50)))
        assert spine.clock() <= 2.0
        assert spine.ledger.rollouts_in_flight == 50


async def test_a_commit_whose_caller_is_cancelled_is_history_all_the_same():
    spine = Spine(commit_seconds=1.0)
    async with beside(spine.recorder.run()):
        spine.admit(0)
        commit = asyncio.ensure_future(spine.recorder.commit(finished(0)))
        await turns()
        commit.cancel()
        await spine.recorder.flush()
        assert spine.journal.events[-1] == finished(0)
        assert spine.ledger.rollouts_in_flight == 1


async def test_a_flush_covers_the_write_under_way_and_what_came_after_it_began():
    spine = Spine(commit_seconds=1.0)
    async with beside(spine.recorder.run()):
        await asyncio.sleep(0.5)
        spine.admit(0)
        await spine.recorder.flush()
        assert len(spine.journal.events) == 2
        assert spine.clock() == 2.0
        await spine.recorder.flush()
        assert spine.clock() == 2.0


async def test_many_bytes_are_written_in_parts_and_a_flush_does_not_wait_for_what_came_after_it():
    spine = Spine(commit_seconds=1.0)
    large = msgspec.structs.replace(rollout(), payload=bytes(WRITE_BYTES // 2 + 1))
    for group in range(7):
        spine.admit(group)
    async with beside(spine.recorder.run()):
        await spine.recorder.flush()
        start = spine.clock()
        commits = [asyncio.ensure_future(spine.recorder.commit(finished(group), large)) for group in range(2)]
        await turns()
        flush = asyncio.ensure_future(spine.recorder.flush())
        await turns()
        commits += [asyncio.ensure_future(spine.recorder.commit(finished(group), large)) for group in range(2, 7)]
        await flush
        assert [commit.done() for commit in commits] == [True, True] + [False] * 5
        assert spine.ledger.rollouts_in_flight == 12
        await asyncio.gather(*commits)
        assert spine.clock() - start == 4.0  # by twos
    assert [event.group for event in spine.journal.events if isinstance(event, Finished)] == list(range(7))
    assert spine.ledger.rollouts_in_flight == 7


async def test_a_journal_that_cannot_be_written_ends_the_run_and_nobody_takes_it_for_a_commit():
    spine, committed = Spine(fails_at=1), []

    async def commit():
        spine.admit(0)
        await spine.recorder.commit(finished(0))
        committed.append(0)

    with pytest.raises(StorageError, match="journal is full"):
        await together(spine.recorder.run(), commit())
    assert committed == []
    assert spine.ledger.rollouts_in_flight == 2


@pytest.mark.parametrize("started", [True, False])
async def test_closing_writes_what_is_pending_whether_or_not_the_recorder_has_begun(started):
    spine = Spine(commit_seconds=1.0)
    writer = asyncio.ensure_future(spine.recorder.run())
    if started:
        await turns()
    spine.admit(0)
    spine.recorder.close()
    await writer
    assert spine.journal.events == spine.events


async def test_after_the_end_nothing_is_recorded_and_nothing_changes():
    spine = Spine()
    spine.recorder.close()
    with pytest.raises(StorageError, match="closed"):
        spine.admit(0)
    with pytest.raises(StorageError, match="closed"):
        await spine.recorder.commit(admitted(0))
    assert spine.ledger.running == {}


async def test_a_contradiction_is_refused_before_it_is_history():
    spine = Spine()
    async with beside(spine.recorder.run()):
        with pytest.raises(ValueError, match="never admitted"):
            spine.drop(7)
        await spine.recorder.flush()
        assert spine.journal.events == spine.events


async def test_it_goes_on_from_a_ledger_that_was_replayed():
    ledger = Ledger()
    for event in (Published(0.0, 3, ()), admitted(0)):
        apply(ledger, event)
    recorder = Recorder(Spine().journal, ledger=ledger)
    assert recorder.watch.now.version == 3
    recorder.record(Ready(0.0, 0, zero_advantage=False))
    assert list(ledger.ready) == [0]


async def _interleaved(seed):
    """Groups whose members commit at random instants while some groups are dropped under them."""
    draw = random.Random(seed)
    spine = Spine(commit_seconds=draw.choice([0.0, 1.0]))

    async def live(group):
        spine.record(admitted(group))
        await asyncio.gather(*(member(group, number) for number in range(2)))
        if group in spine.ledger.running:
            spine.record(Ready(0.0, group, zero_advantage=False))

    async def member(group, number):
        await asyncio.sleep(draw.randint(0, 6))
        if draw.random() < 0.3 and group in spine.ledger.running:
            spine.record(GroupDropped(0.0, group, "incomplete", "", 0, draw.random() < 0.5))
        await spine.recorder.commit(finished(group, number), rollout(group, number))

    async with beside(spine.recorder.run()):
        async with asyncio.TaskGroup() as tasks:
            for group in range(draw.randint(1, 8)):
                tasks.create_task(live(group))
                await asyncio.sleep(draw.randint(0, 1))
        await spine.recorder.flush()
    return spine


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_whatever_comes_between_replaying_the_journal_gives_the_same_ledger(seed, order):
    spine = run(_interleaved(seed), seed=order)
    replayed = Ledger()
    for event in spine.journal.replay():
        apply(replayed, event)
    assert replayed == spine.ledger
