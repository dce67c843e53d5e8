"""Evaluation: each due version once, failures counted and never scored, slots given back, mixed versions said so."""

import asyncio
import math

import msgspec
import pytest
from doubles import Spine, beside, failure, prompt, rollout, together, turns

from headway.errors import WorkerFailed
from headway.events import EvalFinished, EvalStarted, Resumed
from headway.flow.eval_sink import EvalSink
from headway.flow.gate import CapacityGate
from headway.rules.admission import GateLimits
from headway.settings import EvalSection
from headway.types import SamplingParams, Score


class Stage:
    """An eval sink with a real gate; `result(member, version)` is what a rollout comes to after `seconds`."""

    def __init__(self, result=None, *, seconds=1.0, prompts=3, n=2, every=1, concurrent=4, score=None, at_start=True, retried=()):
        self.spine = Spine()
        self.retried = retried
        self.result = result or (lambda number, version: rollout(reward=1.0, head=version))
        self.seconds = seconds
        self.rows, self.requests, self.now, self.peak = [], [], 0, 0
        limits = GateLimits(groups_per_batch=1, group_size=2, max_concurrent=concurrent, steps_ahead=1.0, steps=100)
        self.gate = CapacityGate(limits, watch=self.spine.watch, record=self.spine.record, clock=self.spine.clock)
        self.sink = EvalSink(
            settings=EvalSection(every=every, n=n, prompts="p.jsonl", at_start=at_start),
            prompts=[prompt(number) for number in range(prompts)],
            sampling=SamplingParams(temperature=0.0),
            watch=self.spine.watch,
            record=self.spine.record,
            admit=self.gate.admit_eval,
            release=self.gate.release_eval,
            run_rollout=self.run_rollout,
            score=score,
            export=lambda stream, row: self.rows.append((stream, row)),
            clock=self.spine.clock,
        )

    async def run_rollout(self, given, *, group, member, purpose, sampling, on_retry):
        assert (purpose, sampling.temperature) == ("eval", 0.0)
        number = len(self.requests)
        self.requests.append((given.id, member))
        self.now += 1
        self.peak = max(self.peak, self.now)
        version = self.spine.ledger.version
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.now -= 1
        for attempt, lost in enumerate(self.retried):
            on_retry(attempt, lost)
        result = self.result(number, version)
        if isinstance(result, Exception):
            raise result
        return result

    @property
    def row(self):
        ((stream, row),) = self.rows
        assert stream == "eval"
        return row


async def test_every_prompt_is_attempted_n_times_within_the_shared_limit():
    stage = Stage(prompts=5, n=3, concurrent=4)
    await stage.sink.evaluate()
    await turns()
    assert sorted(stage.requests) == [(f"p{number}", member) for number in range(5) for member in range(3)]
    assert stage.peak == 4
    assert stage.gate.eval_in_flight == 0
    assert stage.spine.of(EvalStarted) == [EvalStarted(0.0, 0, 15)]
    assert stage.spine.of(EvalFinished) == [EvalFinished(4.0, 0, 15, 0, mixed=False, sampled_tokens=15 * 5)]


class Payload(bytes):
    """Token data that says when it is gone."""

    alive = 0

    def __init__(self, *_):
        Payload.alive += 1

    def __del__(self):
        Payload.alive -= 1


async def test_the_tokens_of_a_rollout_that_is_counted_are_not_kept_until_the_evaluation_ends():
    most = []

    def result(number, version):
        most.append(Payload.alive)
        return msgspec.structs.replace(rollout(reward=1.0, head=version), payload=Payload(b"tokens"))

    stage = Stage(result, prompts=10, concurrent=1)
    await stage.sink.evaluate()
    assert max(most) <= 2


async def test_J04_its_row_says_what_was_measured():
    rewards = [0.0, 1.0, 0.5, None]
    stage = Stage(lambda number, _: failure("timeout") if rewards[number] is None else rollout(reward=rewards[number]), prompts=2)
    await stage.sink.evaluate()
    assert stage.row == {
        "version": 0,
        "time": 1.0,
        "seconds": 1.0,
        "rollouts": 4,
        "ok": 3,
        "failed": 1,
        "failed_by_cause": {"timeout": 1},
        "reward_mean": 0.5,
        "reward_mean_all": 0.375,
        "rollout_tokens_mean": 8.0,
        "version_min": 0,
        "version_max": 0,
        "mixed": False,
        "temperature": 0.0,
        "repeated": False,
    }


async def test_one_that_repeats_an_evaluation_cut_short_by_a_crash_says_so_and_the_next_does_not():
    stage = Stage(lambda *_: rollout())
    stage.spine.record(EvalStarted(0.0, 0, 1))
    stage.spine.record(Resumed(0.0, 0, 0, "line"))
    for _ in range(2):
        await stage.sink.evaluate()
    assert [row["repeated"] for _, row in stage.rows] == [True, False]


async def test_every_token_of_an_evaluation_is_counted_those_of_failures_and_of_retried_attempts_too():
    lost = msgspec.structs.replace(failure("timeout"), sampled_tokens=3)
    stage = Stage(lambda number, _: lost if number == 0 else rollout(reward=math.nan if number == 1 else 1.0), prompts=2, retried=(lost,))
    await stage.sink.evaluate()
    assert stage.spine.of(EvalFinished)[0].sampled_tokens == 4 * 3 + 3 + 3 * 5


async def test_J04_when_all_fail_there_is_no_score_and_the_run_goes_on():
    stage = Stage(lambda *_: failure())
    await stage.sink.evaluate()
    assert (stage.row["ok"], stage.row["failed"], stage.row["failed_by_cause"]) == (0, 6, {"environment_error": 6})
    assert (stage.row["reward_mean"], stage.row["reward_mean_all"], stage.row["version_min"]) == (None, None, None)
    assert stage.spine.of(EvalFinished)[0].failed == 6


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
async def test_a_reward_that_is_none_is_a_failure_and_never_a_zero(reward):
    stage = Stage(lambda number, _: rollout(reward=reward if number == 0 else 1.0))
    await stage.sink.evaluate()
    assert (stage.row["ok"], stage.row["failed_by_cause"], stage.row["reward_mean"]) == (5, {"bad_reward": 1}, 1.0)


@pytest.mark.parametrize(
    ("scores", "ok", "causes", "mean"),
    [
        ([Score(0.25)], 6, {}, 0.25),
        ([Score(None)], 0, {"bad_reward": 6}, None),
        (failure("score_error"), 0, {"score_error": 6}, None),
    ],
)
async def test_a_scorer_scores_evaluation_too(scores, ok, causes, mean):
    async def score(request):
        assert len(request.rollouts) == 1
        return scores

    stage = Stage(lambda *_: rollout(reward=None), score=score)
    await stage.sink.evaluate()
    assert (stage.row["ok"], stage.row["failed_by_cause"], stage.row["reward_mean"]) == (ok, causes, mean)


async def test_J02_each_due_version_is_evaluated_once_and_the_newest_after_a_jump():
    stage = Stage(every=10, seconds=0.5)
    async with beside(stage.sink.run()):
        await asyncio.sleep(30)
        for version in (3, 9, 10, 11, 19, 20, 45, 49):
            stage.spine.publish(version)
            await asyncio.sleep(30)
    assert [row["version"] for _, row in stage.rows] == [0, 10, 20, 45]


async def test_a_version_that_comes_due_during_an_evaluation_is_next():
    stage = Stage(seconds=10.0)
    async with beside(stage.sink.run()):
        await asyncio.sleep(1)
        stage.spine.publish(1)
        stage.spine.publish(2)
        await asyncio.sleep(100)
    assert [row["version"] for _, row in stage.rows] == [0, 2]
    assert [row["mixed"] for _, row in stage.rows] == [True, False]


@pytest.mark.parametrize("published", [True, False])
async def test_J02_an_evaluation_with_tokens_of_another_version_is_mixed_published_yet_or_not(published):
    stage = Stage(lambda number, _: rollout(head=0, tail=int(number == 0)))
    if published:
        asyncio.get_running_loop().call_at(0.5, stage.spine.publish, 1)
    await stage.sink.evaluate()
    assert (stage.row["mixed"], stage.row["version_min"], stage.row["version_max"]) == (True, 0, 1)
    assert stage.spine.of(EvalFinished)[0].mixed


@pytest.mark.parametrize("after", [0.0, 0.5, 1.0, 1.5])
async def test_an_evaluation_that_is_cancelled_gives_all_its_slots_back_and_has_not_happened(after):
    stage = Stage(prompts=9)
    evaluating = asyncio.ensure_future(stage.sink.evaluate())
    asyncio.get_running_loop().call_at(after, evaluating.cancel)
    with pytest.raises(asyncio.CancelledError):
        await evaluating
    await turns()
    assert (stage.gate.eval_in_flight, stage.rows, stage.spine.of(EvalFinished)) == (0, [], [])
    assert stage.spine.ledger.last_eval == -1


@pytest.mark.parametrize("steps", range(6))
async def test_a_rollout_that_is_cancelled_before_its_first_step_gives_its_slot_back(steps):
    stage = Stage(prompts=1, n=1)
    evaluating = asyncio.ensure_future(stage.sink.evaluate())
    await turns(steps)
    evaluating.cancel()
    await asyncio.wait([evaluating])
    await turns()
    assert stage.gate.eval_in_flight == 0


async def test_an_error_travels_and_gives_the_slots_back():
    stage = Stage(lambda number, _: WorkerFailed("gone") if number == 2 else rollout())
    with pytest.raises(WorkerFailed):
        await together(stage.sink.evaluate())
    await turns()
    assert (stage.gate.eval_in_flight, stage.rows) == (0, [])


async def test_evaluation_leaves_training_alone():
    stage = Stage(concurrent=2)
    await stage.sink.evaluate()
    ledger = stage.spine.ledger
    assert (ledger.running, ledger.ready, ledger.rollouts_in_flight, ledger.sampled_tokens, ledger.lost) == ({}, {}, 0, 0, {})
