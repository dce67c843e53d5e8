"""A rollout ends once: as a rollout or as a failure, within its attempts and its deadline, whatever else goes on."""

import asyncio

import pytest
from doubles import beside, failure, prompt, rollout, together, turns
from scripted_runner import Script, go, runner, stuck

from headway.errors import EngineFailed, EnvironmentFailed, WorkerFailed
from headway.rules.scheduling import rollout_seed
from headway.types import Failure, Rollout, SamplingParams


async def test_a_rollout_is_asked_for_with_all_that_it_depends_on():
    attempt = Script(rollout(7))
    assert await go(runner(attempt, max_rollout_tokens=99), member=2) == rollout(7)
    (request,) = attempt.requests
    assert (request.group, request.member, request.attempt, request.prompt, request.purpose) == (7, 2, 0, prompt(1), "train")
    assert (request.engine, request.seed) == ("sim://a", rollout_seed(3, "train", prompt(1), 2, 0))
    assert (request.sampling, request.max_rollout_tokens) == (SamplingParams(), 99)


async def test_what_can_be_retried_is_retried_up_to_the_limit_with_a_seed_of_its_own_each_time():
    attempt, heard = Script(failure()), []
    result = await go(runner(attempt, max_attempts=3), on_retry=lambda *what: heard.append(what))
    assert result == failure()
    assert [request.attempt for request in attempt.requests] == [0, 1, 2]
    assert len({request.seed for request in attempt.requests}) == 3
    assert heard == [(0, failure()), (1, failure())]
    assert 0 < asyncio.get_running_loop().time() <= 0.3


async def test_what_would_end_alike_is_attempted_once():
    attempt = Script(failure("bad_reward", retryable=False))
    assert (await go(runner(attempt), on_retry=pytest.fail)).cause == "bad_reward"
    assert len(attempt.requests) == 1


async def test_a_retry_that_brings_a_rollout_is_a_rollout():
    assert await go(runner(Script(failure(), rollout(7, attempt=1)))) == rollout(7, attempt=1)


async def test_each_attempt_goes_to_the_least_loaded_engine_and_gives_its_place_back():
    attempt = Script(rollout(), seconds=1.0)
    it = runner(attempt, engines=("a", "b", "c"))
    await asyncio.gather(*(go(it, member) for member in range(7)))
    assert "".join(request.engine[-1] for request in attempt.requests) == "abcabca"
    assert it.pool.load == {"sim://a": 0, "sim://b": 0, "sim://c": 0}


async def test_an_error_in_an_attempt_travels_and_gives_its_place_back():
    async def broken(request, move):
        raise WorkerFailed("the worker is gone")

    it = runner(broken)
    with pytest.raises(WorkerFailed):
        await go(it)
    assert it.pool.load == {"sim://a": 0, "sim://b": 0}


async def test_a_rollout_past_its_deadline_is_a_timeout_and_the_deadline_spans_all_attempts():
    attempt = Script(failure(), seconds=2.0)
    it = runner(attempt, timeout_seconds=5.0, max_attempts=100)
    async with beside(it.sweep()):
        result = await go(it)
    assert (result.cause, result.retryable) == ("timeout", False)
    assert asyncio.get_running_loop().time() == 5.0
    assert len(attempt.requests) == 3
    assert it.pool.load == {"sim://a": 0, "sim://b": 0}
    assert asyncio.current_task().cancelling() == 0


async def test_one_sweep_watches_over_rollouts_that_start_at_different_times():
    it, ends = runner(stuck, timeout_seconds=10.0), {}

    async def late(start):
        await asyncio.sleep(start)
        assert (await go(it)).cause == "timeout"
        ends[start] = asyncio.get_running_loop().time()

    async with beside(it.sweep()):
        await asyncio.gather(*(late(start) for start in (0, 1, 1, 4, 30)))
    assert ends == {0: 10, 1: 11, 4: 14, 30: 40}


async def test_rollouts_that_end_in_time_leave_no_deadline_behind():
    it = runner(Script(rollout(), seconds=4.0), timeout_seconds=10.0)
    async with beside(it.sweep()):
        for _ in range(5):
            assert isinstance(await go(it), Rollout)
        await asyncio.sleep(100)
    assert asyncio.current_task().cancelling() == 0


async def test_a_rollout_that_is_over_when_the_sweep_wakes_does_not_end_the_sweep():
    async def attempt(request, move):
        return rollout() if request.member == 0 else await stuck(request)

    it = runner(attempt, timeout_seconds=1.0)
    async with beside(it.sweep()):
        await turns()
        assert isinstance(await go(it), Rollout)  # from its start to its end without a turn of the loop for the sweep
        await turns()
        assert (await go(it, 1)).cause == "timeout"


async def test_one_that_takes_long_to_clean_up_does_not_hold_up_the_deadlines_of_others():
    async def cleans_up(request, move):
        try:
            await stuck(request)
        finally:
            await asyncio.sleep(50 if request.member == 0 else 0)

    it, ends = runner(cleans_up, timeout_seconds=10.0), []

    async def one(member):
        ends.append(((await go(it, member)).cause, member, asyncio.get_running_loop().time()))

    async with beside(it.sweep()):
        await asyncio.gather(one(0), one(1), one(2))
    assert ends == [("timeout", 1, 10.0), ("timeout", 2, 10.0), ("timeout", 0, 60.0)]


@pytest.mark.parametrize("answer", [rollout(), failure()])
async def test_user_code_that_swallows_its_cancellation_gets_no_further_attempt(answer):
    calls = []

    async def stubborn(request, move):
        calls.append(request)
        try:
            await stuck(request)
        except asyncio.CancelledError:
            await asyncio.sleep(5)
        return answer

    it = runner(stubborn, timeout_seconds=10.0)
    async with beside(it.sweep()):
        assert (await go(it)).cause == "timeout"
    assert (len(calls), asyncio.get_running_loop().time()) == (1, 15.0)
    assert asyncio.current_task().cancelling() == 0
    without = runner(stubborn)
    task = asyncio.ensure_future(go(without))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(calls) == 2


async def test_a_cancellation_from_outside_is_a_cancellation_even_at_the_deadline():
    it = runner(stuck, timeout_seconds=10.0)
    async with beside(it.sweep()):
        early = asyncio.ensure_future(go(it))
        await asyncio.sleep(3)
        early.cancel()
        with pytest.raises(asyncio.CancelledError):
            await early
        both = asyncio.ensure_future(go(it))
        asyncio.get_running_loop().call_at(13.0, both.cancel)
        with pytest.raises(asyncio.CancelledError):
            await both


async def test_a_deadline_inside_someone_elses_timeout_leaves_that_timeout_intact():
    it = runner(stuck, timeout_seconds=1.0)

    async def within_five_seconds():
        async with asyncio.timeout(5):
            assert (await go(it)).cause == "timeout"
            await asyncio.sleep(100)

    async with beside(it.sweep()):
        with pytest.raises(TimeoutError):
            await within_five_seconds()
    assert asyncio.get_running_loop().time() == 5.0


@pytest.mark.parametrize(
    ("cause", "error"), [("environment_error", EnvironmentFailed), ("engine_error", EngineFailed), ("worker_died", WorkerFailed)]
)
async def test_C02_too_many_failed_attempts_in_a_row_end_the_run_with_the_last_cause(cause, error):
    it = runner(Script(failure(), failure(), failure(cause, detail="that was it")), max_attempts=2, max_consecutive_failures=3)
    assert (await go(it)).cause == "environment_error"
    with pytest.raises(error, match=rf"3 attempts in a row failed \(run.max_consecutive_failures\); the last: {cause}: that was it"):
        await go(it)


async def test_C02_one_success_resets_the_budget():
    attempt = Script(failure(), failure(), rollout(), failure())
    it = runner(attempt, max_attempts=3, max_consecutive_failures=3)
    assert isinstance(await go(it), Rollout)
    with pytest.raises(EnvironmentFailed):
        await go(it)
    assert len(attempt.requests) == 3 + 3


async def test_C02_a_budget_of_zero_is_no_budget():
    it = runner(Script(failure(retryable=False)), max_consecutive_failures=0)
    for _ in range(300):
        assert isinstance(await go(it), Failure)


async def test_one_death_of_a_worker_is_one_failure_however_many_rollouts_it_takes_along():
    deaths = [failure("worker_died", retryable=False, detail="worker-0 (process 7) was ended by SIGKILL")] * 50
    deaths += [failure("worker_died", retryable=False, detail="worker-0 (process 8) was ended by SIGKILL")] * 50
    it = runner(
        Script(*deaths, failure("worker_died", retryable=False, detail="worker-0 (process 9) was ended by SIGKILL")),
        max_consecutive_failures=3,
    )
    for _ in range(100):
        await go(it)
    with pytest.raises(WorkerFailed, match="3 attempts in a row failed"):
        await go(it)


async def test_timeouts_count_as_failures():
    it = runner(stuck, timeout_seconds=1.0, max_consecutive_failures=2)

    async def both():
        await go(it)
        await go(it)

    with pytest.raises(EnvironmentFailed, match="the last: timeout: not finished within 1 s"):
        await together(it.sweep(), both())


async def test_evaluation_neither_uses_up_the_budget_nor_resets_it():
    attempt = Script(failure(retryable=False))
    it = runner(attempt, max_consecutive_failures=2)
    for _ in range(10):
        await go(it, purpose="eval")
    await go(it)
    attempt.answers = [rollout(), failure(retryable=False)]
    await go(it, purpose="eval", sampling=SamplingParams(temperature=0.0))
    assert (attempt.requests[-1].purpose, attempt.requests[-1].sampling.temperature) == ("eval", 0.0)
    with pytest.raises(EnvironmentFailed):
        await go(it)
