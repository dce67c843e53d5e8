"""A rollout whose engine is lost goes on at another one: within its deadline, its moves bounded, its places given back."""

import asyncio

import pytest
from doubles import Spine, beside, checkpoint, failure, prompt, rollout, turns

from headway.errors import EngineFailed
from headway.flow.engine_pool import EnginePool
from headway.flow.runner import MOVES, RolloutRunner
from headway.sim.engine import SimEngine
from headway.types import EngineAddress, SamplingParams

LOST = failure("engine_error", detail="cannot be reached")


class Stage:
    """A runner, its pool, and an attempt that is `acts`: a coroutine function of (stage, request, move)."""

    def __init__(self, acts, *, engines="ab", **more):
        spine = Spine()
        self.pool = EnginePool([SimEngine(name) for name in engines], record=spine.record, clock=spine.clock, lost_timeout_seconds=60.0)
        for name in engines:
            self.pool.serves(name, checkpoint(0))
        self.requests = []

        async def attempt(request, move):
            self.requests.append(request)
            return await acts(self, request, move)

        async def lost_since(place):
            return self.pool.lost_since(place)

        self.runner = RolloutRunner(attempt=attempt, pool=self.pool, lost_since=lost_since, sampling=SamplingParams(), run_seed=3, **more)

    def lose(self, name, **how):
        self.pool.lost(name, EngineFailed("it died"), **how)

    def run(self, member=0, **more):
        return self.runner.run(prompt(1), group=7, member=member, **more)

    @property
    def held(self):
        return sum(self.pool.load.values())


def at(url):
    return EngineAddress(f"sim://{url}")


async def test_an_attempt_goes_on_elsewhere_and_its_place_goes_with_it():
    async def acts(stage, request, move):
        stage.lose("a")
        assert await move(at("a")) == at("b")
        assert stage.pool.load == {"sim://a": 0, "sim://b": 1}
        stage.pool.serves("a", checkpoint(0))
        stage.lose("b")
        assert await move(at("b")) == at("a")
        return rollout(7)

    stage = Stage(acts, max_attempts=1, max_consecutive_failures=1)
    assert await stage.run(on_retry=pytest.fail) == rollout(7)
    assert (len(stage.requests), stage.held) == (1, 0)
    assert stage.pool.deeds("a") == 1  # it is the last engine that has seen it to its end
    assert stage.pool.deeds("b") == 0


async def test_an_engine_that_is_there_is_not_left_and_its_failure_counts():
    async def acts(stage, request, move):
        assert await move(EngineAddress(request.engine)) is None
        return LOST

    stage = Stage(acts, max_attempts=2)
    assert await stage.run() == LOST
    assert [request.attempt for request in stage.requests] == [0, 1]
    assert stage.held == 0


async def test_a_move_waits_while_no_engine_serves_and_may_lead_back():
    async def acts(stage, request, move):
        stage.lose("a")
        assert await move(at("a")) == at("a")
        return rollout(7)

    stage = Stage(acts, engines="a")
    going = asyncio.ensure_future(stage.run())
    await asyncio.sleep(500)
    assert (going.done(), stage.held) == (False, 0)
    stage.pool.serves("a", checkpoint(0))
    assert await going == rollout(7)
    assert stage.held == 0


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
async def test_a_move_that_waits_ends_with_its_rollout(how):
    async def acts(stage, request, move):
        stage.lose("a")
        await move(at("a"))
        pytest.fail("no engine serves")

    stage = Stage(acts, engines="a", timeout_seconds=10.0)
    async with beside(stage.runner.sweep()):
        going = asyncio.ensure_future(stage.run())
        if how == "deadline":
            assert (await going).cause == "timeout"
            assert asyncio.get_running_loop().time() == 10.0
        else:
            await turns()
            going.cancel()
            with pytest.raises(asyncio.CancelledError):
                await going
    stage.pool.serves("a", checkpoint(0))
    await turns()
    assert stage.held == 0


async def test_a_question_that_outlives_its_attempt_takes_no_place():
    asked = []

    async def acts(stage, request, move):
        stage.lose("a")
        asked.append(asyncio.ensure_future(move(at("a"))))
        await turns()
        return failure(retryable=False)

    stage = Stage(acts, engines="a")
    await stage.run()
    stage.pool.serves("a", checkpoint(0))
    assert await asked[0] is None
    assert stage.held == 0


async def test_moves_and_restarts_share_one_bound():
    """An attempt that breaks every engine it meets: moved within attempts, made again beside; then its failures count."""
    moves = []

    async def acts(stage, request, move):
        engine = EngineAddress(request.engine)
        for _ in range(4):
            name = engine.url.removeprefix("sim://")
            stage.lose(name)
            asyncio.get_running_loop().call_later(0.5, stage.pool.serves, name, checkpoint(0))
            there = await move(engine)
            if there is None:
                break
            moves.append(there)
            engine = there
        stage.lose(engine.url.removeprefix("sim://"))
        asyncio.get_running_loop().call_later(0.5, stage.pool.serves, engine.url.removeprefix("sim://"), checkpoint(0))
        return LOST

    stage = Stage(acts, max_attempts=2)
    assert await stage.run() == LOST
    assert len(moves) + len(stage.requests) - 2 == MOVES  # two of the attempts counted
    assert len(moves) == 8
    assert stage.held == 0


async def test_with_restart_no_attempt_may_move():
    async def acts(stage, request, move):
        assert move is None
        if request.attempt:
            return rollout(7)
        stage.lose("a")
        return LOST

    stage = Stage(acts, on_lost="restart", max_attempts=1)
    assert await stage.run() == rollout(7)
    assert [request.engine for request in stage.requests] == ["sim://a", "sim://b"]


async def test_an_engine_that_hangs_is_told_to_who_listens_and_the_attempt_goes_on():
    told = []

    async def acts(stage, request, move):
        gone = asyncio.Event()
        move.when_it_hangs(lambda moves: (told.append(moves), gone.set()))
        await gone.wait()
        assert await move(at("a")) == at("b")
        gone.clear()
        await gone.wait()
        assert await move(at("b")) == at("a")
        return rollout(7)

    stage = Stage(acts, max_attempts=1)
    going = asyncio.ensure_future(stage.run(on_retry=pytest.fail))
    await turns()
    stage.lose("a", hangs=True)
    await turns()
    stage.pool.serves("a", checkpoint(0))
    stage.lose("b", hangs=True)
    stage.lose("b", hangs=True)
    assert await going == rollout(7)
    assert told == [0, 1]
    assert (len(stage.requests), stage.held) == (1, 0)


async def test_who_begins_to_listen_late_is_told_at_once():
    told = []

    async def acts(stage, request, move):
        move.when_it_hangs(told.append)
        stage.lose("a", hangs=True)
        move.when_it_hangs(told.append)
        return rollout(7)

    assert await Stage(acts).run() == rollout(7)
    assert told == [0, 0]


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
async def test_what_ends_a_rollout_ends_it_also_when_its_engine_hangs_and_it_listens(how):
    async def acts(stage, request, move):
        move.when_it_hangs(lambda moves: None)
        stage.lose("a", hangs=True)
        await asyncio.get_running_loop().create_future()

    stage = Stage(acts, timeout_seconds=10.0)
    async with beside(stage.runner.sweep()):
        going = asyncio.ensure_future(stage.run())
        if how == "deadline":
            assert (await going).cause == "timeout"
        else:
            await turns()
            going.cancel()
            with pytest.raises(asyncio.CancelledError):
                await going
    assert (len(stage.requests), stage.held) == (1, 0)


async def test_the_request_says_what_the_engine_speaks_and_whether_the_policy_is_an_adapter():
    async def acts(stage, request, move):
        return rollout(7)

    stage = Stage(acts, lora=True)
    await stage.run()
    assert (stage.requests[0].kind, stage.requests[0].lora) == ("vllm", True)
