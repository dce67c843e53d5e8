"""A rollout whose engine is lost is attempted anew at another: nobody has failed, and its deadline and its moves bound it all the same."""

import asyncio
from typing import Any

import pytest
from doubles import beside, checkpoint, failure, rollout, together, turns
from scripted_runner import Script, go, lose, runner, stuck

from headway.errors import EngineFailed
from headway.flow.runner import MOVES


class Dying:
    """An attempt under which its engine dies, as long as the script says so; then it brings a rollout."""

    def __init__(self, times, *, retryable=True):
        self.times = times
        self.retryable = retryable
        self.requests = []
        self.it: Any = None

    async def __call__(self, request, move=None):
        self.requests.append(request)
        await asyncio.sleep(1.0)
        if len(self.requests) > self.times:
            return rollout(7, attempt=request.attempt)
        lose(self.it, request.engine.removeprefix("sim://"))
        return failure("engine_error", detail="cannot be reached", retryable=self.retryable)


def dying(times, *, retryable=True, **more):
    attempt = Dying(times, retryable=retryable)
    attempt.it = runner(attempt, **more)
    return attempt


async def test_a_rollout_whose_engine_died_is_attempted_anew_at_another_and_nobody_has_failed():
    attempt, heard = dying(1, max_attempts=1, max_consecutive_failures=1, retryable=False), []
    assert await go(attempt.it, on_retry=lambda *what: heard.append(what)) == rollout(7, attempt=1)
    assert [request.engine for request in attempt.requests] == ["sim://a", "sim://b"]
    assert len({request.seed for request in attempt.requests}) == 2
    assert [(number, lost.cause) for number, lost in heard] == [(0, "engine_error")]


async def test_it_waits_while_no_engine_serves_and_goes_on_when_one_is_back():
    attempt = dying(2)
    going = asyncio.ensure_future(go(attempt.it))
    await asyncio.sleep(500)
    assert (len(attempt.requests), going.done()) == (2, False)
    attempt.it.pool.serves("b", checkpoint(0))
    assert await going == rollout(7, attempt=2)
    assert attempt.requests[2].engine == "sim://b"


async def test_a_rollout_that_breaks_every_engine_is_not_moved_for_ever():
    attempt = dying(10_000, max_attempts=3, max_consecutive_failures=3)

    async def doctor():
        while True:
            await asyncio.sleep(0.5)
            for engine in attempt.it.pool.engines:
                if attempt.it.pool.state(engine.name) == "lost":
                    attempt.it.pool.serves(engine.name, checkpoint(0))

    with pytest.raises(EngineFailed, match="3 attempts in a row failed"):
        await together(go(attempt.it), doctor())
    assert len(attempt.requests) == MOVES + 3


async def test_other_failures_still_count_for_a_rollout_that_was_moved():
    attempt = Script(failure("engine_error"), failure("engine_error"), failure())
    it = runner(attempt, max_attempts=2)
    lost = [True, True, False, False]

    async def lost_since(place):
        return lost.pop(0)

    it._lost_since = lost_since
    assert (await go(it)).cause == "environment_error"
    assert [request.attempt for request in attempt.requests] == [0, 1, 2, 3]


async def test_an_attempt_at_an_engine_that_hangs_is_cut_short_and_made_again():
    asked = []

    async def attempt(request, move):
        asked.append(request.engine)
        return rollout(7, attempt=request.attempt) if request.attempt else await stuck(request)

    it = runner(attempt, timeout_seconds=100.0, max_attempts=1)
    async with beside(it.sweep()):
        going = asyncio.ensure_future(go(it))
        await asyncio.sleep(5)
        lose(it, "a", hangs=True)
        assert await going == rollout(7, attempt=1)
    assert asked == ["sim://a", "sim://b"]
    assert it.pool.load == {"sim://a": 0, "sim://b": 0}


async def test_a_deadline_holds_while_a_rollout_waits_for_an_engine_and_while_it_is_cut():
    it = runner(stuck, timeout_seconds=10.0)
    async with beside(it.sweep()):
        both = asyncio.ensure_future(go(it))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_at(10.0, lose, it, "a")
        it.pool.lost("b", EngineFailed("it died"))
        waiting = asyncio.ensure_future(go(it, 1))
        asyncio.get_running_loop().call_at(10.0, lambda: lose(it, "a", hangs=True))
        assert [(await each).cause for each in (both, waiting)] == ["timeout", "timeout"]
        assert asyncio.get_running_loop().time() == 10.0
        late = asyncio.ensure_future(go(it, 2))
        assert (await late).cause == "timeout"
    assert asyncio.get_running_loop().time() == 20.0
    assert asyncio.current_task().cancelling() == 0


async def test_a_cancellation_from_outside_at_an_engine_that_hangs_is_a_cancellation():
    it = runner(stuck)
    going = asyncio.ensure_future(go(it))
    await turns()
    lose(it, "a", hangs=True)
    going.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going
