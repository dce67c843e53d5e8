"""A generation whose engine is lost goes on at another one with what it has; the environment sees one generation, stamped exactly."""

import asyncio

import pytest
from held_ports import held_ports

from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.generation import GenerationFailed
from headway.adapters.engines.in_flight import InFlight
from headway.testing import FakeEngine, Reply, Rule
from headway.testing.engine.script import EngineScript
from headway.types import EngineAddress, SamplingParams

PARTIAL = Rule(nth=(1,), do=Reply(ids=(20, 21), finish="abort"))
KINDS = [("vllm", "vllm"), ("vllm", "sglang"), ("sglang", "vllm")]


@pytest.fixture
async def client():
    client = EngineClient("run", retries=1)
    yield client
    await client.close()


def engine_of(kind, *rules, label="run-3", port=0, **script):
    return FakeEngine(rules, script=EngineScript(speaks=kind, label=label, **script), port=port)


def address(engine):
    return EngineAddress(engine.url, engine.script.speaks)


def to(*engines):
    """Return a move to these, one after the other, and then to none; and what it was asked."""
    asked, left = [], list(engines)

    async def move(failed):
        asked.append(failed)
        return left.pop(0) if left else None

    return move, asked


async def generate(client, engine, **more):
    return await client.generate(address(engine), [1, 5], SamplingParams(), seed=7, max_tokens=8, request_id="train-4-2-1-1", **more)


@pytest.mark.parametrize(("first", "second"), KINDS)
@pytest.mark.parametrize(
    "failing", [Reply(cut=True), Reply(status=500), Reply(status=502), Reply(status=503)], ids=["cut", "500", "502", "503"]
)
async def test_what_was_written_is_kept_with_its_stamps_and_the_rest_is_stamped_by_the_new_engine(client, first, second, failing):
    async with engine_of(first, PARTIAL, Rule(do=failing)) as one, engine_of(second, Rule(do=Reply(ids=(22, 2))), label="run-4") as other:
        move, asked = to(address(other))
        got = await generate(client, one, move=move)
        [arrived] = other.log.of("arrived")
    assert (got.token_ids, got.spans, got.finish) == ([20, 21, 22, 2], [(0, 3), (2, 4)], "stop")
    assert len(got.logprobs) == 4
    assert (arrived["prompt"], arrived["max_tokens"]) == ([1, 5, 20, 21], 6)
    assert asked == [address(one)]


@pytest.mark.parametrize("second", ["vllm", "sglang"])
async def test_what_was_written_is_kept_where_the_new_engine_holds_no_more_than_that(client, second):
    async with engine_of("vllm", PARTIAL, Rule(do=Reply(status=500))) as one, engine_of(second, context=4) as other:
        move, _ = to(address(other))
        got = await generate(client, one, move=move)
    assert (got.token_ids, got.spans, got.finish) == ([20, 21], [(0, 3)], "length")


async def test_an_engine_that_is_gone_is_left(client):
    with held_ports() as port:
        async with engine_of("vllm", port=port) as one, engine_of("vllm", label="run-4") as other:
            await one.stop()
            move, _ = to(address(other))
            assert (await generate(client, one, move=move)).spans == [(0, 4)]


async def test_an_engine_that_came_back_with_other_weights_is_left(client):
    async with engine_of("vllm", PARTIAL, label="run-3") as one, engine_of("vllm", label="run-4") as other:
        one.rules = [PARTIAL, Rule(do=Reply(label="default"))]
        move, _ = to(address(other))
        got = await generate(client, one, move=move)
    assert got.spans == [(0, 3), (2, 4)]


async def test_an_engine_that_is_lost_as_well_is_left_as_well(client):
    async with (
        engine_of("vllm", PARTIAL, Rule(do=Reply(status=500))) as one,
        engine_of("sglang", PARTIAL, Rule(do=Reply(cut=True)), label="run-4") as two,
        engine_of("vllm", Rule(do=Reply(ids=(22, 2))), label="run-5") as three,
    ):
        move, asked = to(address(two), address(three))
        got = await generate(client, one, move=move)
    assert got.token_ids == [20, 21, 20, 21, 22, 2]
    assert got.spans == [(0, 3), (2, 4), (4, 5)]
    assert asked == [address(one), address(two)]


async def test_without_another_engine_the_failure_counts_as_ever(client):
    async with engine_of("vllm", PARTIAL, Rule(do=Reply(cut=True))) as engine:
        move, asked = to()
        for moving in (move, None):
            engine.rules = [PARTIAL, Rule(do=Reply(cut=True))]
            with pytest.raises(GenerationFailed, match="tried 2 times") as caught:
                await generate(client, engine, move=moving)
            assert (caught.value.retryable, caught.value.sampled_tokens) == (False, 2)
    assert asked == [address(engine)]


@pytest.mark.parametrize(
    "refusal",
    [
        Reply(status=422),
        Reply(status=429),
        Reply(logprobs="fewer", ids=(20, 21)),
        Reply(ids=()),
        Reply(ids=(20,), finish="error"),
        Reply(text="<html>"),
    ],
    ids=["422", "429", "logprobs", "empty", "error", "html"],
)
async def test_an_engine_that_answers_is_not_left(client, refusal):
    async with engine_of("vllm", Rule(do=refusal)) as engine:
        move, asked = to(address(engine))
        with pytest.raises(GenerationFailed):
            await generate(client, engine, move=move)
    assert asked == []


@pytest.mark.parametrize("hangs_at", ["/inference/v1/generate", "/weight_info"])
async def test_a_request_that_is_given_up_is_one_to_a_lost_engine(client, hangs_at):
    in_flight = InFlight()
    async with engine_of("vllm", PARTIAL) as one, engine_of("vllm", Rule(do=Reply(ids=(22, 2))), label="run-4") as other:
        one.rules = [Rule(match={"path": hangs_at}, do=Reply(hang=True))]

        async def move(failed):
            in_flight.renew()
            return address(other)

        task = asyncio.create_task(generate(client, one, move=move, in_flight=in_flight))
        await one.until(lambda: any(entry["path"] == hangs_at for entry in [*one.log.of("arrived"), *one.log.of("asked")]))
        in_flight.give_up()
        got = await task
        await one.until(lambda: one.running == 0)
    assert got.token_ids == [22, 2]


async def test_cancelling_while_a_move_is_awaited_is_cancelling(client):
    async with engine_of("vllm", Rule(do=Reply(status=500))) as engine:
        asked = asyncio.Event()

        async def move(_failed):
            asked.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(generate(client, engine, move=move))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
