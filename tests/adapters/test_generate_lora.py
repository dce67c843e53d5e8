"""Generations of LoRA policies: the newest adapter of the run is asked for by name, and stamps every token of its answer."""

import asyncio

import pytest
from held_ports import held_ports

from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.generation import GenerationFailed
from headway.testing import FakeEngine, Reply, Rule
from headway.testing.engine.script import EngineScript
from headway.types import EngineAddress, EngineKind, SamplingParams


@pytest.fixture
async def client():
    client = EngineClient("run", retries=1)
    yield client
    await client.close()


@pytest.fixture(params=["vllm", "sglang", "completions"])
def script(request):
    kind: EngineKind = "vllm" if request.param == "completions" else request.param
    return EngineScript(speaks=kind, label="default", generate_route=request.param != "completions")


async def generate(client, engine, **more):
    address = EngineAddress(engine.url, engine.script.speaks)
    return await client.generate(address, [1, 5], SamplingParams(), seed=7, max_tokens=8, request_id="r", lora=True, **more)


def load(engine, *names):
    engine.adapters.loaded = dict.fromkeys(names, "/somewhere")


def used(engine):
    return [entry["adapter"] for entry in engine.log.of("arrived")]


async def test_the_newest_adapter_of_the_run_writes_and_stamps_every_token(client, script):
    async with FakeEngine(script=script) as engine:
        load(engine, "run-9", "run-10", "run-010", "other-12", "run-x", "chat")
        got = await generate(client, engine)
    assert used(engine) == ["run-10"]
    assert got.spans == [(0, 10)]


async def test_spans_of_the_base_model_say_nothing_about_an_adapter(client):
    async with FakeEngine(script=EngineScript(speaks="vllm", label="run-3")) as engine:
        load(engine, "run-4")
        assert (await generate(client, engine)).spans == [(0, 4)]


async def test_an_adapter_that_was_loaded_before_a_request_writes_it(client, script):
    """Else groups that are born at a version would have tokens of the one before: over the bound where max_staleness is tight."""
    async with FakeEngine(script=script) as engine:
        load(engine, "run-4")
        await generate(client, engine)
        load(engine, "run-4", "run-5")
        got = await asyncio.gather(*(generate(client, engine) for _ in range(20)))
    assert used(engine) == ["run-4", *["run-5"] * 20]
    assert [each.spans for each in got] == [[(0, 5)]] * 20


async def test_an_adapter_that_is_gone_is_asked_for_no_more(client, script):
    async with FakeEngine(script=script) as engine:
        load(engine, "run-4")
        # it is unloaded between the list of models and the request
        engine.log.listeners.append(lambda: load(engine, "run-5", "run-6") if engine.log.of("arrived") else None)
        got = await generate(client, engine)
    assert used(engine) == ["run-4", "run-6"]
    assert got.spans == [(0, 6)]


async def test_adapters_that_go_faster_than_they_can_be_asked_for_end_in_a_refusal(client, script):
    refusal = {"vllm": (404, "The model `run-4` does not exist."), "sglang": (400, "LoRA adapters are not loaded: run-4")}[script.speaks]
    async with FakeEngine([Rule(do=Reply(status=refusal[0], text=refusal[1]))], script=script) as engine:
        load(engine, "run-4")
        with pytest.raises(GenerationFailed, match=str(refusal[0])):
            await generate(client, engine)
        assert len(engine.log.of("arrived")) <= 6


async def test_a_part_that_another_adapter_continues_is_stamped_by_it(client):
    async with FakeEngine(script=EngineScript(speaks="vllm")) as engine:
        load(engine, "run-4")
        engine.rules = [
            Rule(nth=(1,), do=Reply(ids=(20, 21), finish="abort")),
            Rule(nth=(1,), do=Reply(status=404, text="The model `run-4` does not exist.")),
            Rule(do=Reply(ids=(22, 2))),
        ]
        engine.log.listeners.append(lambda: load(engine, "run-5") if len(engine.log.of("finished")) == 1 else None)
        got = await generate(client, engine)
    assert got.token_ids == [20, 21, 22, 2]
    assert got.spans == [(0, 4), (2, 5)]


async def test_generations_at_once_look_for_the_adapter_once(client):
    async with FakeEngine(script=EngineScript(speaks="vllm")) as engine:
        load(engine, "run-4")
        await asyncio.gather(*(generate(client, engine) for _ in range(50)))
        looked = [entry for entry in engine.log.of("asked") if entry["path"] == "/v1/models"]
    assert len(looked) <= 3


async def test_before_the_first_adapter_the_base_model_is_version_0(client, script):
    async with FakeEngine(script=script) as engine:
        got = await generate(client, engine)
        assert got.spans == [(0, 0)]
        assert used(engine) == [""]


async def test_a_server_that_has_lost_its_adapters_is_lost(client, script):
    with held_ports() as port:
        async with FakeEngine(script=script, port=port) as engine:
            load(engine, "run-4")
            await generate(client, engine)
        async with FakeEngine(script=script, port=port) as engine:
            with pytest.raises(GenerationFailed, match="has no LoRA adapter of this run") as caught:
                await generate(client, engine)
    assert caught.value.lost


@pytest.mark.parametrize("label", ["run-3", "other-0"])
async def test_a_base_model_of_another_name_is_no_version(client, label):
    async with FakeEngine(script=EngineScript(speaks="vllm", label=label)) as engine:
        with pytest.raises(GenerationFailed, match=f'calls its own weights "{label}"'):
            await generate(client, engine)


async def test_a_server_that_lists_no_models_is_refused(client):
    async with FakeEngine([Rule(match={"path": "/v1/models"}, do=Reply(text="<html>"))], script=EngineScript(speaks="vllm")) as engine:
        with pytest.raises(GenerationFailed, match="listed no models"):
            await generate(client, engine)
