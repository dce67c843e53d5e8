"""Ingest: durable before it is answered, refused with a reason when there is no slack, and everything that was offered is counted."""

import asyncio

import msgspec
import pytest
from doubles import beside, prompt, together, turns
from ingest_stage import UNUSABLE, Stage, group

from headway.errors import StorageError
from headway.events import BatchAcknowledged, Finished, Ingested
from headway.flow.ingest import LONGEST_RETRY_SECONDS, MOST_WAITING, WAIT_SECONDS, Refused, Taken
from headway.rules.batching import chosen, groups_to_take


async def test_a_posted_group_is_durable_and_in_line_before_its_sender_hears_of_it():
    stage = Stage(commit_seconds=0.5)
    async with stage.running():
        answer = asyncio.ensure_future(stage.ingest.offer(group("first", members=3)))
        await asyncio.sleep(0.4)
        assert not answer.done()
        assert not stage.sink
        assert stage.spine.ledger.promised == {0: 1}  # its place is taken already
        assert await answer == Taken(0, 0)
        durable = [event for event in stage.spine.journal.events if isinstance(event, Finished)]
        assert [(event.group, event.member, event.head, event.tail) for event in durable] == [(0, n, -1, -1) for n in range(3)]
        (finished,) = stage.sink
        assert (finished.admission.group, finished.admission.prompt.id, finished.admission.birth, finished.lost) == (0, "first", -1, ())
        assert [(one.group, one.member, one.source) for one in finished.rollouts] == [(0, n, "external") for n in range(3)]
        references = [event.reference for event in durable if event.reference is not None]
        written = [msgspec.structs.replace(await stage.spine.journal.read(one), reference=one) for one in references]
        assert finished.rollouts == tuple(written)
        assert stage.balance() == (1, 1, {}, 1)


async def test_it_counts_in_no_statistics_of_live_groups():
    stage = Stage()
    async with stage.running():
        await stage.ingest.offer(group())
        ledger = stage.spine.ledger
        assert (ledger.births, ledger.sampled_tokens, ledger.rollouts_in_flight, ledger.admitted) == ({}, 0, 0, 0)
        assert (ledger.ready_tokens, ledger.latency_seconds) == (0, 0.0)
        assert stage.gate.capacity == 3


async def test_a_group_that_the_sink_cannot_use_is_answered_without_a_batch():
    stage = Stage()
    async with stage.running():
        assert await stage.ingest.offer(group(UNUSABLE)) == Taken(0, None)
        assert stage.gate.capacity == 4
        assert stage.balance() == (1, 1, {}, 0)


async def test_without_slack_a_sender_waits_a_moment_and_is_told_to_come_again():
    stage = Stage(replayed_groups=1)
    loop = asyncio.get_running_loop()
    async with stage.running():
        await stage.ingest.offer(group())
        assert await stage.ingest.offer(group()) == Refused("no slack", 1)
        assert loop.time() == WAIT_SECONDS
        waiting = asyncio.ensure_future(stage.ingest.offer(group("late")))
        await asyncio.sleep(WAIT_SECONDS / 2)
        stage.spine.form(0)
        stage.spine.publish(1)
        assert await waiting == Taken(1, 1)
        assert stage.balance() == (3, 2, {"no slack": 1}, 1)


@pytest.mark.parametrize(("cycle", "elapsed", "retry"), [(0.2, 0.0, 1), (9.4, 0.0, 6), (9.4, 5.0, 1), (9.4, 100.0, 1), (1000.0, 0.0, 60)])
async def test_it_is_told_to_come_again_so_that_it_waits_when_the_next_version_is_due(cycle, elapsed, retry):
    stage = Stage(replayed_groups=0)
    for k, time in enumerate((0.0, cycle)):
        stage.spine.form()
        stage.spine.record(BatchAcknowledged(time, k))
    async with stage.running():
        await asyncio.sleep(3.0)
        stage.spine.publish(1)
        await asyncio.sleep(elapsed)
        assert await stage.ingest.offer(group()) == Refused("no slack", retry)
        arrives = elapsed + WAIT_SECONDS + retry
        assert arrives <= cycle or retry == 1  # two seconds earlier or later
        assert arrives + WAIT_SECONDS >= cycle or retry == LONGEST_RETRY_SECONDS


async def test_a_sender_that_does_as_told_gets_a_place_of_each_version_beside_a_hungry_stream_of_live_groups():
    stage = Stage(replayed_groups=1)
    ledger, cycle = stage.spine.ledger, 30.0
    taken: list[int] = []

    async def live():
        for n in range(10**6):
            await stage.gate.admit(prompt(n))

    async def train():
        for k in range(12):
            await asyncio.sleep(cycle)
            for one in [*ledger.running]:
                stage.spine.ready_now(one)
            stage.spine.form(*chosen(ledger, groups_to_take(ledger, stage.limits)))
            stage.spine.record(BatchAcknowledged(stage.spine.clock(), k))
            stage.spine.publish(k + 1)

    async def send():
        while True:
            answer = await stage.ingest.offer(group())
            if isinstance(answer, Taken):
                assert answer.batch is not None
                taken.append(answer.batch)
            else:
                await asyncio.sleep(answer.retry_seconds)

    async with stage.running(), beside(live(), send()):
        await train()
    assert len(taken) >= 9  # it has to meet the first versions by chance
    assert taken[-6:] == list(range(taken[-1] - 5, taken[-1] + 1))


async def test_of_many_that_wait_at_once_the_last_are_refused_at_once():
    stage = Stage(replayed_groups=0)
    async with stage.running():
        offers = [asyncio.ensure_future(stage.ingest.offer(group())) for _ in range(MOST_WAITING + 3)]
        await turns()
        assert [task.result() for task in offers if task.done()] == [Refused("busy", 1)] * 3
        await asyncio.gather(*offers)
        assert stage.balance() == (MOST_WAITING + 3, 0, {"busy": 3, "no slack": MOST_WAITING}, 0)
        assert stage.ingest.unwelcome() is None


async def test_before_the_start_and_at_the_end_nothing_is_taken():
    stage = Stage(published=False)
    assert await stage.ingest.offer(group()) == Refused("not started", 1)
    async with stage.running() as (running, _):
        assert await stage.ingest.offer(group()) == Refused("not started", 1)
        stage.spine.publish(0)
        stage.gate.pause()
        waiting = asyncio.ensure_future(stage.ingest.offer(group()))
        await turns()
        stage.spine.drain()
        assert await waiting == Refused("ending")
        assert await stage.ingest.offer(group()) == Refused("ending")
        await running
    assert await stage.ingest.offer(group()) == Refused("ending")
    assert stage.balance() == (5, 0, {"not started": 2, "ending": 3}, 0)


async def test_a_paused_run_takes_nothing_but_may_later():
    stage = Stage()
    async with stage.running():
        stage.gate.pause()
        assert (await stage.ingest.offer(group())).reason == "no slack"
        stage.gate.resume()
        assert await stage.ingest.offer(group()) == Taken(0, 0)


async def test_who_hangs_up_after_its_place_was_given_has_posted_the_group_all_the_same():
    stage = Stage(commit_seconds=1.0)
    async with stage.running():
        offer = asyncio.ensure_future(stage.ingest.offer(group()))
        await asyncio.sleep(0.5)
        offer.cancel()
        await asyncio.sleep(2.0)  # the history before it has to be written first
        assert offer.cancelled()
        assert len(stage.sink) == 1
        assert stage.balance() == (1, 1, {}, 1)


async def test_who_hangs_up_while_waiting_is_counted_and_holds_nothing():
    stage = Stage(replayed_groups=1)
    async with stage.running():
        await stage.ingest.offer(group())
        offer = asyncio.ensure_future(stage.ingest.offer(group()))
        await turns()
        offer.cancel()
        await turns()
        assert stage.balance() == (2, 1, {"ending": 1}, 1)
        assert stage.gate.capacity == 3


async def test_what_has_a_place_when_the_drain_begins_is_seen_through():
    stage = Stage(commit_seconds=1.0)
    async with stage.running() as (running, _):
        offer = asyncio.ensure_future(stage.ingest.offer(group()))
        await asyncio.sleep(0.5)
        stage.spine.drain()
        await turns()
        assert not running.done()
        assert await offer == Taken(0, 0)
        await running


async def test_a_journal_that_cannot_be_written_ends_the_run_and_promises_nothing():
    stage = Stage(fails_at=3)
    answers = []

    async def post():
        answers.append(await stage.ingest.offer(group(members=3)))

    with pytest.raises(StorageError):
        await together(stage.spine.recorder.run(), stage.ingest.run(), post())
    assert not answers
    assert not stage.sink


# Replay -------------------------------------------------------------------------------------------------------------------------------


async def groups_of(names, fails=None):
    for name in names:
        yield group(name, source="replay")
    if fails is not None:
        raise fails


async def test_a_replay_source_waits_for_slack_and_ends_quietly():
    stage = Stage(b=2, replayed_groups=1, replayed=groups_of("abc"))
    async with stage.running() as (running, _):
        for version, name in enumerate("abc"):
            await asyncio.sleep(1000.0)
            (finished,) = stage.sink
            assert (finished.admission.group, finished.admission.prompt.id) == (version, name)
            assert {one.source for one in finished.rollouts} == {"replay"}
            stage.sink.clear()
            stage.spine.form(version)
            stage.spine.publish(version + 1)
        await asyncio.sleep(1000.0)
        assert not running.done()  # it goes on to take what is posted
        assert (await stage.ingest.offer(group())).batch == 3
        assert stage.balance() == (4, 4, {}, 1)


async def test_a_replay_source_that_waits_at_the_end_is_counted():
    stage = Stage(replayed_groups=1, replayed=groups_of("abc"))
    async with stage.running() as (running, _):
        stage.spine.drain()
        await running
    assert stage.balance() == (2, 1, {"ending": 1}, 1)


async def test_a_hungry_source_gets_its_whole_share_of_each_batch_beside_a_stream_of_live_groups():
    stage = Stage(b=8, replayed_groups=3, replayed=groups_of(map(str, range(100))), commit_seconds=0.1)
    ledger = stage.spine.ledger

    async def live():
        for n in range(10**6):
            await stage.gate.admit(prompt(n))

    async with stage.running(), beside(live()):
        for k in range(10):
            await asyncio.sleep(10.0)
            assert (ledger.promised, len(ledger.running)) == ({k: 3}, 5)
            for one in [*ledger.running]:
                stage.spine.ready_now(one)
            stage.spine.form(*chosen(ledger, 5))
            stage.spine.publish(k + 1)
        assert [one.admission.prompt.id for one in stage.sink] == [str(n) for n in range(30)]


async def test_a_damaged_file_ends_the_run():
    stage = Stage(replayed=groups_of("a", StorageError("old.jsonl:3: is damaged")))
    with pytest.raises(StorageError, match=r"old\.jsonl:3"):
        async with stage.running():
            await asyncio.sleep(10.0)
    assert len(stage.spine.of(Ingested)) == 1
