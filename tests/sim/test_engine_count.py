"""A simulated engine counts every token when it is written, whatever becomes of it."""

import asyncio
import math

import pytest

from headway.errors import EngineFailed
from headway.sim.distributions import Fixed
from headway.sim.engine import EngineSettings, SimEngine
from headway.sim.worker import Fault, RolloutSettings, SimWorker
from headway.types import AttemptRequest, Checkpoint, Prompt, Rollout, SamplingParams


def request(member=0):
    return AttemptRequest(0, member, 0, Prompt("p", 0, {}), "train", "e", 0, SamplingParams(), 0)


async def test_tokens_count_while_they_are_written_and_stay_counted():
    engine = SimEngine("e")
    worker = SimWorker(RolloutSettings(seconds=Fixed(2.0), tokens_per_second=10.0), [engine])
    attempt = asyncio.ensure_future(worker.attempt(request()))
    for at, count in ((0.55, 5), (1.0, 10), (1.95, 19)):
        await asyncio.sleep(at - asyncio.get_running_loop().time())
        assert await engine.sampled_tokens() == count
    assert isinstance(await attempt, Rollout)
    assert engine.sampled == 20


async def test_what_is_cancelled_was_sampled_all_the_same():
    engine = SimEngine("e")
    worker = SimWorker(RolloutSettings(seconds=Fixed(2.0), tokens_per_second=10.0), [engine])
    attempt = asyncio.ensure_future(worker.attempt(request()))
    await asyncio.sleep(0.75)
    attempt.cancel()
    await asyncio.wait([attempt])
    assert engine.sampled == 7


async def test_a_failed_attempt_counts_what_it_wrote_and_delivers_whole_turns():
    engine = SimEngine("e")
    settings = RolloutSettings(seconds=Fixed(2.0), tokens_per_second=10.0, turns=2, faults=(Fault("environment_error", 1.0),))
    failures = [await SimWorker(settings, [engine]).attempt(request(member)) for member in range(20)]
    delivered = sum(failure.sampled_tokens for failure in failures)
    assert delivered <= engine.sampled < delivered + 10 * len(failures)
    assert {failure.sampled_tokens for failure in failures} == {0, 10}


async def test_no_token_is_written_while_weights_are_synced():
    engine = SimEngine("e", EngineSettings(transfer_seconds=5.0))
    worker = SimWorker(RolloutSettings(seconds=Fixed(2.0), tokens_per_second=10.0), [engine])
    attempt = asyncio.ensure_future(worker.attempt(request()))
    await asyncio.sleep(1.0)
    checkpoint = Checkpoint(1, "sim-1", "")
    await engine.prepare(checkpoint)
    await engine.transfer(checkpoint)
    assert engine.sampled == 10
    await engine.commit(checkpoint)
    await attempt
    assert engine.sampled == 20


async def test_the_dead_do_not_say_what_they_wrote():
    engine = SimEngine("e", EngineSettings(dies_at=1.0))
    worker = SimWorker(RolloutSettings(seconds=Fixed(math.inf)), [engine])
    await worker.attempt(request())
    with pytest.raises(EngineFailed, match="died"):
        await engine.sampled_tokens()
