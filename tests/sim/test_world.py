"""The simulated world keeps the protocols, and its arithmetic is exact."""

import asyncio
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import BoundBreached, EngineFailed, PromptError, StorageError, TrainerFailed
from headway.events import Draining, Finished
from headway.formats.rollout import decode_samples
from headway.protocols import BatchStore, Engine, Entry, Exporter, Journal, PromptSource, Trainer, Worker
from headway.sim.distributions import Fixed, Lognormal, Uniform
from headway.sim.engine import EngineSettings, SimEngine, join_stamps
from headway.sim.journal import SimJournal
from headway.sim.loop import run
from headway.sim.prompts import ListPrompts, RecordingExporter
from headway.sim.store import SimBatchStore, keep
from headway.sim.trainer import SimTrainer, TrainerSettings
from headway.sim.worker import Fault, RolloutSettings, SimWorker
from headway.types import (
    Admission,
    AttemptRequest,
    Batch,
    Checkpoint,
    Failure,
    PayloadReference,
    Prompt,
    ReadyGroup,
    Rollout,
    SamplingParams,
)


def checkpoint(version):
    return Checkpoint(version, f"sim-{version}", f"sim://{version}")


def request(member=0, *, prompt="p", attempt=0, group=0, engine="sim://engine-0"):
    return AttemptRequest(group, member, attempt, Prompt(prompt, 0, {}), "train", engine, 7, SamplingParams(), 0)


async def sync(engine, version):
    await engine.prepare(checkpoint(version))
    await engine.transfer(checkpoint(version))
    await engine.commit(checkpoint(version))


def world(**settings):
    engine = SimEngine("engine-0", label="sim-0")
    return engine, SimWorker(RolloutSettings(**settings), [engine])


def test_the_adapters_are_what_the_protocols_ask_for():
    engine, worker = world()
    store = SimBatchStore()
    parts: tuple[Engine, Worker, BatchStore, Trainer, Journal, PromptSource, Exporter] = (
        engine,
        worker,
        store,
        SimTrainer(TrainerSettings(), store.batches, lineage="sim"),
        SimJournal(),
        ListPrompts(1),
        RecordingExporter(),
    )
    assert len(parts) == 7  # mypy reads the annotation; here it is only built


# ------------------------------------------------------------------------------------------------------------------------------ engine


@given(
    st.lists(st.integers(1, 40), max_size=6),
    st.integers(0, 100),
    st.integers(1, 100),
    st.integers(1, 64),
)
def test_every_token_is_stamped_with_the_version_served_when_it_was_written(gaps, start, seconds, tokens):
    async def main():
        engine = SimEngine("e", label="sim-0")
        for version, gap in enumerate(gaps, start=1):
            await asyncio.sleep(gap)
            await sync(engine, version)
        return engine.stamps(float(start), float(seconds), tokens)

    spans = run(main())
    commits = np.cumsum(gaps)
    for token in range(tokens):
        served = int((commits * tokens <= start * tokens + seconds * token).sum())
        assert [version for first, version in spans if first <= token][-1] == served
    assert [first for first, _ in spans] == sorted({first for first, _ in spans})
    assert spans[0][0] == 0


async def test_a_rollout_stands_still_while_weights_are_synced_and_straddles_the_versions():
    engine = SimEngine("engine-0", EngineSettings(prepare_seconds=0.5, transfer_seconds=1.0, commit_seconds=0.5), label="sim-0")
    worker = SimWorker(RolloutSettings(seconds=Fixed(10.0), tokens_per_second=10.0), [engine])
    attempt = asyncio.create_task(worker.attempt(request()))
    await asyncio.sleep(4)
    await sync(engine, 1)
    rollout = await attempt
    assert (rollout.started, rollout.finished) == (0.0, 12.0)
    assert rollout.metadata["spans"] == [(0, 0), (40, 1)]
    assert (rollout.head, rollout.tail, rollout.sampled_tokens) == (0, 1, 100)


async def test_an_engine_that_does_not_pause_swaps_weights_under_a_rollout():
    engine = SimEngine("engine-0", EngineSettings(transfer_seconds=2.0, pauses=False), label="sim-0")
    worker = SimWorker(RolloutSettings(seconds=Fixed(10.0)), [engine])
    attempt = asyncio.create_task(worker.attempt(request()))
    await sync(engine, 1)
    rollout = await attempt
    assert rollout.finished == 10.0
    assert rollout.metadata["spans"] == [(0, 0), (200, 1)]


async def test_a_failed_sync_is_abandoned_and_the_old_weights_serve_on():
    engine = SimEngine("engine-0", EngineSettings(fails=frozenset({("transfer", 1)})), label="sim-0")
    await engine.prepare(checkpoint(1))
    with pytest.raises(EngineFailed, match="transfer of sim-1"):
        await engine.transfer(checkpoint(1))
    await engine.abandon()
    assert (engine.paused, await engine.label()) == (False, "sim-0")
    await sync(engine, 1)
    assert (engine.version, await engine.label()) == (1, "sim-1")


async def test_a_dead_engine_fails_what_it_runs_at_that_moment_and_says_so():
    engine = SimEngine("engine-0", EngineSettings(dies_at=3.0))
    failure = await SimWorker(RolloutSettings(seconds=Fixed(10.0)), [engine]).attempt(request())
    assert isinstance(failure, Failure)
    assert failure.cause == "engine_error"
    assert asyncio.get_running_loop().time() == 3.0
    with pytest.raises(EngineFailed, match="died at 3 s"):
        await engine.label()


def test_stamps_of_turns_join_without_a_seam_where_the_version_stays():
    assert join_stamps([(10, [(0, 1), (4, 2)]), (5, [(0, 2)]), (5, [(0, 2), (2, 5)])]) == [(0, 1), (4, 2), (17, 5)]


# ------------------------------------------------------------------------------------------------------------------------------ worker


@given(st.permutations(range(8)))
def test_a_rollout_is_the_same_in_whatever_order_rollouts_are_started(order):
    async def main(order):
        _, worker = world(
            seconds=Lognormal(2.0, 1.0), turns=3, tool_seconds=Uniform(0.0, 1.0), faults=(Fault("environment_error", 0.3),), payload=True
        )
        ended = await asyncio.gather(*(worker.attempt(request(member)) for member in order))
        return dict(zip(order, ended, strict=True))

    assert run(main(order)) == run(main(range(8)))


async def test_another_attempt_at_a_member_draws_other_numbers():
    _, worker = world(seconds=Lognormal(2.0, 1.0))
    first, second = [await worker.attempt(request(attempt=number)) for number in (0, 1)]
    assert first.sampled_tokens != second.sampled_tokens


async def test_turns_and_tools_take_their_time():
    _, worker = world(seconds=Fixed(6.0), turns=3, tool_seconds=Fixed(5.0), tokens_per_second=10.0)
    rollout = await worker.attempt(request())
    assert rollout.finished == 16.0
    assert (rollout.turns, rollout.sampled_tokens, rollout.tokens) == (3, 60, 16 + 60 + 2 * 8)


async def test_a_payload_says_what_the_header_says():
    engine, worker = world(seconds=Fixed(6.0), turns=3, tool_seconds=Fixed(1.0), tokens_per_second=10.0, payload=True)
    attempt = asyncio.create_task(worker.attempt(request()))
    await asyncio.sleep(3.5)  # in the second turn
    await sync(engine, 1)
    rollout = await attempt
    (sample,) = decode_samples(rollout.payload)
    assert len(sample.token_ids) == rollout.tokens
    assert sample.sampled_mask.sum() == rollout.sampled_tokens
    assert list(zip(sample.span_start, sample.span_version, strict=True)) == rollout.metadata["spans"] == [(0, 0), (25, 1)]


async def test_faults_come_as_often_as_their_probability_and_before_the_rollout_would_have_ended():
    _, worker = world(seconds=Fixed(10.0), faults=(Fault("environment_error", 0.2), Fault("worker_died", 0.1, retryable=False)))
    ended = [await worker.attempt(request(member)) for member in range(1000)]
    causes = [result.cause for result in ended if isinstance(result, Failure)]
    assert 160 < causes.count("environment_error") < 240
    assert 70 < causes.count("worker_died") < 130
    assert all(result.retryable == (result.cause != "worker_died") for result in ended if isinstance(result, Failure))
    assert 1000 * 7 < asyncio.get_running_loop().time() < 1000 * 10


async def test_an_attempt_that_hangs_can_be_cancelled():
    _, worker = world(seconds=Fixed(math.inf))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(100):
            await worker.attempt(request())
    assert (worker.in_flight, worker.peak) == (0, 1)


# ---------------------------------------------------------------------------------------------------------------------- store, trainer


def rollout(group, member, spans, tokens):
    return Rollout(
        group=group,
        member=member,
        attempt=0,
        prompt_id="p",
        environment="sim",
        reward=float(member % 2),
        rewards={},
        finish="stop",
        turns=1,
        started=0.0,
        finished=1.0,
        engine="e",
        metadata={"spans": spans},
        samples=1,
        tokens=tokens,
        sampled_tokens=tokens,
        head=min(version for _, version in spans),
        tail=max(version for _, version in spans),
        payload=b"",
    )


def batch(k, *stamps, on_stale="mask", max_staleness=2):
    groups = tuple(
        ReadyGroup(
            Admission(number, Prompt("p", 0, {}), len(members), 0),
            tuple(rollout(number, member, spans, 10) for member, spans in enumerate(members)),
            (1.0, -1.0),
        )
        for number, members in enumerate(stamps)
    )
    return Batch(k, groups, max_staleness, on_stale, 1.0)


def test_tokens_past_the_bound_are_counted_as_masked_and_the_rest_by_staleness():
    kept = keep(batch(5, ([(0, 2), (4, 3), (9, 5)], [(0, 5)])))
    assert dict(kept.masked) == {3: 4}
    assert dict(kept.tokens) == {2: 5, 0: 11}
    assert (kept.oldest_contributing, kept.max_seen, dict(kept.heads), kept.whole_heads) == (3, 2, {2: 1, 0: 1}, 1)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (batch(5, ([(0, 6)],)), "does not exist yet"),
        (batch(5, ([(0, 2)],)), "no token that may train"),
        (batch(5, ([(0, 2)],), on_stale="wait"), "max_staleness is 2"),
    ],
)
def test_a_batch_that_breaks_the_bound_is_refused(bad, says):
    with pytest.raises(BoundBreached, match=says):
        keep(bad)


async def test_the_row_measures_the_batch():
    row = await SimBatchStore().write(batch(5, ([(0, 2), (4, 3), (9, 5)], [(0, 5)])))
    expected = {"batch": 5, "groups": 1, "rollouts": 2, "contributing_tokens": 16, "masked_tokens": 4, "reward_mean": 0.5}
    assert {key: row[key] for key in expected} == expected
    assert (row["token_staleness_mean"], row["token_staleness_p50"], row["token_staleness_max"]) == (10 / 16, 0, 2)
    assert (row["head_coverage"], row["trainable_share"]) == (0.5, 0.8)


async def trained(settings, batches=6):
    store = SimBatchStore()
    trainer = SimTrainer(settings, store.batches, lineage="sim")
    for k in range(batches):
        await store.write(batch(k, ([(0, k)],)))
        await trainer.submit(k)
    return trainer


async def test_the_newest_checkpoint_comes_when_it_is_trained():
    trainer = await trained(TrainerSettings(seconds=Fixed(2.0), late={3: 10.0}))
    clock = asyncio.get_running_loop().time
    assert (await trainer.checkpoint(0), clock()) == (checkpoint(1), 2.0)
    await asyncio.sleep(3.5)
    assert (await trainer.checkpoint(1), clock()) == (checkpoint(2), 5.5)
    assert (await trainer.checkpoint(2), clock()) == (checkpoint(3), 6.0)
    assert (await trainer.checkpoint(3), clock()) == (checkpoint(4), 18.0)
    assert await trainer.metrics(3) == {"step_seconds": 2.0}


async def test_a_trainer_that_dies_raises_when_its_batch_would_be_done():
    trainer = await trained(TrainerSettings(dies_at=2))
    assert (await trainer.checkpoint(1)).version == 2
    with pytest.raises(TrainerFailed, match="died of batch 2"):
        await trainer.checkpoint(2)
    assert asyncio.get_running_loop().time() == 3.0


async def test_the_trainer_refuses_batches_out_of_order_unwritten_or_over_the_bound():
    store = SimBatchStore()
    trainer = SimTrainer(TrainerSettings(), store.batches, lineage="sim")
    with pytest.raises(TrainerFailed, match="where batch 0 comes next"):
        await trainer.submit(1)
    with pytest.raises(TrainerFailed, match="before it was written"):
        await trainer.submit(0)
    store.batches[5] = replace(keep(batch(5, ([(0, 2)],), max_staleness=4)), max_staleness=1)
    with pytest.raises(BoundBreached, match="version 2: max_staleness is 1"):
        await SimTrainer(TrainerSettings(), store.batches, lineage="sim", version=5).submit(5)


# --------------------------------------------------------------------------------------------------------------------- prompts, journal


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 5))
def test_P01_every_epoch_holds_every_prompt_once_in_an_order_that_the_seed_fixes(n, epochs, seed):
    async def main():
        return [prompt async for prompt in ListPrompts(n, epochs=epochs, seed=seed)]

    prompts = run(main())
    assert prompts == run(main())
    for epoch in range(epochs):
        assert sorted(prompt.fields["number"] for prompt in prompts[epoch * n : (epoch + 1) * n]) == list(range(n))
        assert all(prompt.epoch == epoch for prompt in prompts[epoch * n : (epoch + 1) * n])


async def test_a_source_can_fail_on_the_way():
    source = aiter(ListPrompts(10, fails_after=1))
    await anext(source)
    with pytest.raises(PromptError, match="after 1 prompts"):
        await anext(source)


async def test_the_journal_holds_what_was_written_and_nothing_past_its_end():
    journal = SimJournal(commit_seconds=0.5, fails_at=2)
    event = Finished(0.0, 0, 1, 0, 1.0, 10, 10, 0, 0)
    entries = [Entry(Draining(0.0, "x")), Entry(event, rollout(0, 1, [(0, 0)], 10))]
    drained, finished = await journal.append(entries)
    assert [drained, finished] == list(journal.replay())
    assert (drained, msgspec.structs.replace(finished, reference=None)) == (entries[0].event, event)
    assert asyncio.get_running_loop().time() == 0.5
    assert isinstance(finished, Finished)
    assert finished.reference is not None
    assert (await journal.read(finished.reference)).member == 1
    with pytest.raises(StorageError, match="no rollout is kept"):
        await journal.read(PayloadReference(1, 99, 0, 0))
    with pytest.raises(StorageError, match="full after 2"):
        await journal.append(entries[:1])
