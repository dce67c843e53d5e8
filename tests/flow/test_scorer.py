"""Scores are given, or the member is lost with its cause; never invented, never waited for without end."""

import asyncio
import math

import msgspec
import pytest
from doubles import Spine, failure, filled, rollout, together, turns

from headway.errors import StorageError, WorkerFailed
from headway.events import RolloutDropped
from headway.flow.channels import Channel
from headway.flow.scorer import TRIES, Scorer
from headway.types import Admission, FinishedGroup, Prompt, Score, ScoreRequest


def group(number=0, members=2, lost=()):
    rollouts = tuple(rollout(number, member, reward=None, rewards={"format": 0.5}) for member in range(members))
    return FinishedGroup(Admission(number, Prompt(f"p{number}", 0, {}), members + len(lost), 0), rollouts, tuple(lost))


class Judge:
    """A scorer that takes its time and says what `verdict(request)` says; it keeps what it was asked and how many at once."""

    def __init__(self, verdict=lambda request: [Score(1.0)] * len(request.rollouts), seconds=1.0):
        self.verdict, self.seconds = verdict, seconds
        self.requests, self.now, self.peak = [], 0, 0

    async def __call__(self, request):
        self.requests.append(request)
        self.now += 1
        self.peak = max(self.peak, self.now)
        try:
            await asyncio.sleep(self.seconds)
            return self.verdict(request)
        finally:
            self.now -= 1


async def whole(rollouts):
    return tuple(rollouts)


async def scorer(judge, groups, *, scope="rollout", concurrency=4, timeout=0.0, record=None, load=whole, **more):
    finished = await filled(*groups)
    return Scorer(
        finished=finished,
        score=judge,
        scope=scope,
        concurrency=concurrency,
        timeout_seconds=timeout,
        load=load,
        record=record or (lambda event: None),
        clock=float,
        **more,
    )


async def scored(it, *beside_it):
    out = []

    async def collect():
        async for one in it.scored:
            out.append(one)

    await together(it.run(), collect(), *beside_it)
    return sorted(out, key=lambda one: one.admission.group)


async def test_each_rollout_is_scored_by_itself_and_its_parts_are_merged():
    judge = Judge(lambda request: [Score(request.rollouts[0].member / 4, {"judge": 0.25})])
    (one,) = await scored(await scorer(judge, [group(members=3)]))
    assert [member.reward for member in one.rollouts] == [0.0, 0.25, 0.5]
    assert one.rollouts[0].rewards == {"format": 0.5, "judge": 0.25}
    assert [len(request.rollouts) for request in judge.requests] == [1, 1, 1]


async def test_a_group_is_scored_together_when_that_is_its_scope():
    judge = Judge(lambda request: [Score(float(member.member)) for member in request.rollouts])
    (one,) = await scored(await scorer(judge, [group(members=3)], scope="group"))
    assert [member.reward for member in one.rollouts] == [0.0, 1.0, 2.0]
    assert len(judge.requests) == 1


@pytest.mark.parametrize(
    ("verdict", "cause"),
    [
        (failure("score_error"), "score_error"),
        ([], "score_error"),
        ([Score(1.0)] * 5, "score_error"),
        ([Score(None)], "bad_reward"),
        ([Score(math.nan)], "bad_reward"),
        ([Score(math.inf)], "bad_reward"),
    ],
)
async def test_what_is_no_score_loses_its_member_and_only_that(verdict, cause):
    judge = Judge(lambda request: verdict if request.rollouts[0].member == 1 else [Score(0.5)])
    (one,) = await scored(await scorer(judge, [group(members=3, lost=("timeout",))]))
    assert [member.member for member in one.rollouts] == [0, 2]
    assert one.lost == ("timeout", cause)


@pytest.mark.parametrize("cause", ["worker_died", "score_error"])
@pytest.mark.parametrize(("failures", "again"), [(1, True), (TRIES - 1, True), (TRIES, False)])
async def test_what_was_lost_to_no_fault_of_its_own_is_scored_again_a_bounded_number_of_times(cause, failures, again):
    left = [failure(cause)] * failures
    judge = Judge(lambda request: left.pop() if left else [Score(0.5)])
    (one,) = await scored(await scorer(judge, [group(members=1)]))
    assert ([member.reward for member in one.rollouts], one.lost) == (([0.5], ()) if again else ([], (cause,)))
    assert len(judge.requests) == min(failures + 1, TRIES)


async def test_what_would_fail_alike_is_scored_once():
    judge = Judge(lambda request: failure("score_error", retryable=False))
    (one,) = await scored(await scorer(judge, [group(members=1)]))
    assert (one.lost, len(judge.requests)) == (("score_error",), 1)


async def test_a_group_scored_together_falls_together():
    (one,) = await scored(await scorer(Judge(lambda _: [Score(1.0)]), [group(members=3)], scope="group"))
    assert (one.rollouts, one.lost) == ((), ("score_error",) * 3)


@pytest.mark.parametrize("scope", ["rollout", "group"])
async def test_a_group_without_rollouts_passes_unscored(scope):
    judge = Judge()
    (one,) = await scored(await scorer(judge, [group(members=0, lost=("timeout", "timeout"))], scope=scope))
    assert (one.lost, judge.requests) == (("timeout", "timeout"), [])


async def test_never_more_calls_at_once_than_allowed_and_no_fewer():
    judge = Judge()
    assert len(await scored(await scorer(judge, [group(number) for number in range(20)], concurrency=3))) == 20
    assert judge.peak == 3
    assert asyncio.get_running_loop().time() == math.ceil(40 / 3)


async def test_a_call_that_takes_too_long_loses_its_member_and_its_slot_comes_back():
    judge = Judge(seconds=100.0)
    both = await scored(await scorer(judge, [group(0), group(1)], concurrency=1, timeout=5.0))
    assert [one.lost for one in both] == [("score_error", "score_error")] * 2
    assert asyncio.get_running_loop().time() == 20.0  # waiting for a slot is not the scorer's time
    assert judge.now == 0


async def test_a_cancelled_scorer_gives_no_scores_and_leaves_no_calls():
    judge = Judge(seconds=100.0)
    it = await scorer(judge, [group(0), group(1)])
    running = asyncio.ensure_future(it.run())
    await asyncio.sleep(1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (len(it.scored), judge.now) == (0, 0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_error_of_the_worker_travels_and_ends_the_calls_beside_it():
    async def judge(request):
        if request.rollouts[0].member == 1:
            raise WorkerFailed("the worker is gone")
        await asyncio.sleep(1000)

    it = await scorer(judge, [group(members=4)])
    with pytest.raises(WorkerFailed):
        await together(it.run())
    assert asyncio.get_running_loop().time() == 0.0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await it.scored.send(None)  # an open channel takes it: a crash is no end of the input


@pytest.mark.parametrize("scope", ["rollout", "group"])
async def test_a_drain_can_end_what_is_being_scored_and_what_waits_for_it(scope):
    judge = Judge(seconds=1e9)
    it = await scorer(judge, [group(number) for number in range(4)], scope=scope, concurrency=2)
    asyncio.get_running_loop().call_at(7.0, it.cancel_all)
    out = await scored(it)
    assert [one.lost for one in out] == [("cancelled", "cancelled")] * 4
    assert asyncio.get_running_loop().time() == 7.0
    assert judge.now == 0


@pytest.mark.parametrize("scope", ["rollout", "group"])
async def test_groups_that_are_left_to_a_later_process_are_neither_scored_nor_lost(scope):
    spine = Spine()
    judge = Judge(seconds=10.0)
    it = await scorer(judge, [group(number) for number in range(4)], scope=scope, concurrency=4, record=spine.record)
    asyncio.get_running_loop().call_at(15.0 if scope == "rollout" else 5.0, it.leave_all)
    out = await scored(it)
    assert [one.admission.group for one in out] == ([0, 1] if scope == "rollout" else [])
    assert spine.of(RolloutDropped) == []
    assert judge.now == 0


async def test_a_drain_meets_calls_that_ran_out_of_time_and_still_clean_up():
    class Stubborn(Judge):
        async def __call__(self, request):
            try:
                return await super().__call__(request)
            except asyncio.CancelledError:
                await asyncio.sleep(5.0)
                raise

    it = await scorer(Stubborn(seconds=100.0), [group()], timeout=2.0)
    asyncio.get_running_loop().call_at(3.0, it.cancel_all)
    asyncio.get_running_loop().call_at(3.5, it.cancel_all)
    (out,) = await scored(it)
    assert out.lost == ("cancelled", "cancelled")
    assert asyncio.get_running_loop().time() == 3.0


async def test_a_drain_does_not_end_the_scoring_of_an_evaluation():
    it = await scorer(Judge(seconds=9.0), [])
    request = ScoreRequest(0, Prompt("p", 0, {}), (rollout(),))
    asyncio.get_running_loop().call_at(3.0, it.cancel_all)
    assert await it.score(request) == [Score(1.0)]


async def test_a_single_request_shares_the_concurrency_and_the_deadline_and_goes_on_after_a_drain():
    judge = Judge(seconds=3.0)
    it = await scorer(judge, [], concurrency=1, timeout=5.0)
    request = ScoreRequest(0, Prompt("p", 0, {}), (rollout(reward=None),))
    it.cancel_all()
    results = await asyncio.gather(it.score(request), it.score(request))
    assert results == [[Score(1.0)]] * 2
    assert judge.peak == 1
    judge.seconds = 6.0
    assert (await it.score(request)).cause == "score_error"


async def test_a_scorer_that_is_slow_holds_its_input_back():
    spine, judge = Spine(), Judge(seconds=10.0)
    finished = Channel(2)
    it = Scorer(
        finished=finished,
        score=judge,
        scope="group",
        concurrency=2,
        timeout_seconds=0.0,
        load=whole,
        record=lambda event: None,
        clock=float,
    )
    sent = []

    async def send():
        for number in range(50):
            await finished.send(group(number))
            sent.append(number)

    running = [asyncio.ensure_future(it.run()), asyncio.ensure_future(send())]
    await turns(200)
    assert len(sent) <= 10
    assert spine.clock() == 0.0
    for task in running:
        task.cancel()
    await asyncio.wait(running)


async def test_who_loses_a_finished_rollout_says_so_in_the_journal():
    events = []
    judge = Judge(lambda request: [Score(None if request.rollouts[0].member else 1.0)])
    (one,) = await scored(await scorer(judge, [group(7, members=2)], record=events.append))
    assert (len(one.rollouts), one.lost) == (1, ("bad_reward",))
    (event,) = events
    assert (event.group, event.member, event.cause, event.final, event.finished) == (7, 1, "bad_reward", True, True)


async def test_payloads_left_on_disk_are_loaded_for_the_scorer_alone_and_no_more_at_once_than_it_takes():
    loaded = held = most = 0

    async def load(rollouts):
        nonlocal loaded, held, most
        loaded, held = loaded + len(rollouts), held + len(rollouts)
        most = max(most, held)
        return tuple(msgspec.structs.replace(one, payload=b"tokens") for one in rollouts)

    def verdict(request):
        nonlocal held
        held -= len(request.rollouts)
        assert [one.payload for one in request.rollouts] == [b"tokens"] * len(request.rollouts)
        return [Score(1.0)] * len(request.rollouts)

    out = await scored(await scorer(Judge(verdict), [group(number) for number in range(10)], concurrency=3, load=load))
    assert (loaded, most) == (20, 3)
    assert {one.payload for part in out for one in part.rollouts} == {b""}


async def test_a_payload_that_cannot_be_loaded_ends_the_run_and_is_no_score():
    async def load(rollouts):
        raise StorageError("the record of group 0, member 0 cannot be read again")

    it = await scorer(Judge(), [group()], load=load)
    with pytest.raises(StorageError, match="the record of group 0"):
        await scored(it)


async def test_a_group_that_was_dropped_while_it_waited_is_passed_on_and_costs_no_score():
    judge, live = Judge(), {1}
    out = await scored(await scorer(judge, [group(0), group(1)], is_live=live.__contains__))
    assert out[0] == group(0)
    assert {request.group for request in judge.requests} == {1}


async def test_a_timeout_that_is_somebody_elses_is_neither_a_score_nor_the_end_of_the_run():
    def verdict(request):
        raise TimeoutError("a bug")

    with pytest.raises(TimeoutError, match="a bug"):
        await scored(await scorer(Judge(verdict), [group()], timeout=100.0))
