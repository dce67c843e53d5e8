"""LoRA adapters: read before an engine hears of them, loaded under their version's name, unloaded in time, lost with the server."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from held_ports import held_ports
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from headway.adapters.engines import admin_of
from headway.adapters.engines.http import HttpPool
from headway.adapters.engines.lora import adapters_of, misfit
from headway.errors import EngineFailed, StorageError
from headway.formats.probe import Probe, write_probe
from headway.settings import EngineSection
from headway.testing import EngineScript, FakeEngine, Reply, Rule
from headway.types import Checkpoint, EngineAddress

MODULE = "model.layers.0.self_attn.q_proj"
WEIGHT, IN, OUT, RANK = f"{MODULE}.weight", 6, 4, 2
STEM = f"base_model.model.{MODULE}"
BASE: dict[str, tuple[str, tuple[int, ...]]] = {WEIGHT: ("F32", (OUT, IN))}


@pytest.fixture(params=["vllm", "sglang"])
def kind(request):
    return request.param


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({WEIGHT: np.zeros((OUT, IN), np.float32)}, directory / "model.safetensors")
    return Checkpoint(0, "abc-0", str(directory))


def adapter(directory: Path, version: int, *, config=None, **tensors) -> Checkpoint:
    path = directory / f"{version}"
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK} if config is None else config))
    both = {f"{STEM}.lora_A.weight": np.zeros((RANK, IN), np.float32), f"{STEM}.lora_B.weight": np.zeros((OUT, RANK), np.float32)}
    save_file(tensors or both, path / "adapter_model.safetensors")
    return Checkpoint(version, f"abc-{version}", str(path))


@asynccontextmanager
async def served(kind, model, *rules, generate_route=True):
    script = EngineScript(speaks=kind, generate_route=generate_route)
    with held_ports() as port:  # its own when it is down as well
        async with FakeEngine(rules, script=script, port=port) as server:
            settings = EngineSection(weight_transfer="lora", request_timeout_seconds=60.0)
            admin = admin_of("engine-0", EngineAddress(server.url, kind), settings, model=model.directory)
            yield server, admin
            await admin.close()


async def sync(admin, weights: Checkpoint):
    """All three steps; return what the transfer took."""
    await admin.prepare(weights)
    took = await admin.transfer(weights)
    await admin.commit(weights)
    return took


async def test_the_base_model_is_version_0_and_each_later_one_an_adapter_under_its_label(tmp_path, kind, model):
    async with served(kind, model) as (server, admin):
        assert await admin.label() == "default"
        assert await sync(admin, model) is None, "nothing was loaded"
        assert await admin.label() == "abc-0"
        assert not server.adapters.loaded
        for version in (1, 2, 3):
            weights = adapter(tmp_path, version)
            took = await sync(admin, weights)
            assert (took.way, took.bytes) == ("lora", 4 * RANK * (IN + OUT))
            assert await admin.label() == weights.label
        assert server.adapters.loaded == {"abc-2": str(tmp_path / "2"), "abc-3": str(tmp_path / "3")}, "the two newest"
        asked = {entry["path"] for entry in server.log.of("asked")}
        routes = {f"{'/v1' if kind == 'vllm' else ''}/{verb}_lora_adapter" for verb in ("load", "unload")}
        assert asked == {"/v1/models", *routes}, "nothing is paused, labelled or reloaded"


async def test_requests_in_flight_keep_their_adapter_while_it_is_unloaded(tmp_path, kind, model):
    slow = Rule(match={"purpose": "train"}, do=Reply(tokens=60, token_seconds=0.01))
    async with served(kind, model, slow) as (server, admin):
        await sync(admin, adapter(tmp_path, 1))
        http = HttpPool()
        if kind == "vllm":
            body = {"request_id": "train-1-0-0-1", "token_ids": [5], "sampling_params": {"max_tokens": 60}, "model": "abc-1"}
            path = "/inference/v1/generate"
        else:
            body = {"rid": "train-1-0-0-1", "input_ids": [5], "sampling_params": {"max_new_tokens": 60}, "lora_path": "abc-1"}
            path = "/generate"
        running = asyncio.create_task(http.request("POST", server.url + path, msgspec.json.encode(body)))
        await server.until(lambda: bool(server.log.of("arrived")))
        for version in (2, 3):
            await sync(admin, adapter(tmp_path, version))
        assert "abc-1" not in server.adapters.loaded
        assert (await running).status == 200
        await http.close()
        [finished] = server.log.of("finished")
        assert (finished["adapter"], finished["finish"], len(finished["ids"])) == ("abc-1", "stop", 60)


async def test_a_server_that_was_started_anew_has_no_adapter_and_says_so(tmp_path, kind, model):
    async with served(kind, model) as (server, admin):
        await sync(admin, model)
        four = adapter(tmp_path, 4)
        await sync(admin, four)
        await server.kill()
        await server.start()
        assert await admin.label() == "abc-0"
        await sync(admin, four)
        assert await admin.label() == "abc-4"


async def test_an_adapter_that_is_there_already_is_the_same(tmp_path, kind, model):
    async with served(kind, model) as (server, admin):
        four = adapter(tmp_path, 4)
        server.adapters.loaded["abc-4"] = four.directory  # by an orchestrator that was killed
        await sync(admin, four)
        assert await admin.label() == "abc-4"


async def test_probes_are_of_the_adapter(tmp_path, kind, model):
    async with served(kind, model) as (server, admin):
        await sync(admin, adapter(tmp_path, 4))
        assert {entry["adapter"] for entry in server.log.of("probed")} == {"abc-4"}


async def test_an_adapter_by_which_the_engine_does_not_sample_is_unloaded_to_be_loaded_anew(tmp_path, kind, model):
    async with served(kind, model) as (server, admin):
        await sync(admin, adapter(tmp_path, 4))
        five = adapter(tmp_path, 5)
        chances = np.array([1e-9] * 99 + [1.0], np.float32)
        write_probe(tmp_path / "5", Probe((1, 2, 3), np.log(chances / chances.sum())))
        with pytest.raises(EngineFailed, match="serves other weights"):
            await sync(admin, five)
        await admin.abandon()
        assert await admin.label() == "abc-4"
        assert list(server.adapters.loaded) == ["abc-4"]


async def test_probes_of_an_adapter_go_by_completions_where_there_is_nothing_else(tmp_path, model):
    async with served("vllm", model, generate_route=False) as (server, admin):
        await sync(admin, adapter(tmp_path, 4))
        assert {(entry["path"], entry["adapter"]) for entry in server.log.of("probed")} == {("/v1/completions", "abc-4")}


async def test_an_adapter_that_the_engine_refuses_is_named_and_the_newest_stays(tmp_path, kind, model):
    path = "/v1/load_lora_adapter" if kind == "vllm" else "/load_lora_adapter"
    refusing = Rule(match={"path": path, "adapter": "abc-5"}, do=Reply(status=400, text="rank 2 is too much"))
    async with served(kind, model, refusing) as (_, admin):
        await sync(admin, adapter(tmp_path, 4))
        with pytest.raises(EngineFailed, match="rank 2 is too much"):
            await sync(admin, adapter(tmp_path, 5))
        await admin.abandon()
        assert await admin.label() == "abc-4"


async def test_an_adapter_that_cannot_be_unloaded_holds_nothing_up(tmp_path, kind, model):
    path = "/v1/unload_lora_adapter" if kind == "vllm" else "/unload_lora_adapter"
    busy = Rule(match={"path": path, "adapter": "abc-1"}, nth=(1,), do=Reply(status=400, text="in use"))
    async with served(kind, model, busy) as (server, admin):
        for version in (1, 2, 3):
            await sync(admin, adapter(tmp_path, version))
        assert set(server.adapters.loaded) == {"abc-1", "abc-2", "abc-3"}
        await sync(admin, adapter(tmp_path, 4))
        assert set(server.adapters.loaded) == {"abc-3", "abc-4"}


A, B = f"{STEM}.lora_A.weight", f"{STEM}.lora_B.weight"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ({"config": {"peft_type": "LORA", "r": 3}}, "of rank 3"),
        ({"config": {"peft_type": "PREFIX_TUNING"}}, "must be a LoRA adapter"),
        ({"config": []}, "cannot be read"),
        ({A: np.zeros((RANK, IN), np.float32)}, "has no lora_B.weight beside it"),
        ({A: np.zeros((RANK, IN), np.float32), B: np.zeros((OUT, 3), np.float32)}, "has shapes"),
        ({A: np.zeros((RANK, 5), np.float32), B: np.zeros((OUT, RANK), np.float32)}, "of the model is"),
        (
            {key.replace("q_proj", "z_proj"): value for key, value in ((A, np.zeros((RANK, IN))), (B, np.zeros((OUT, RANK))))},
            "which the model does not have",
        ),
    ],
)
async def test_an_adapter_that_is_none_of_the_model_is_refused_before_the_engine_hears_of_it(tmp_path, kind, model, spoil, says):
    async with served(kind, model) as (server, admin):
        with pytest.raises(StorageError, match=says):
            await admin.prepare(adapter(tmp_path, 4, **spoil))
        assert not server.log.of("asked")


async def test_an_adapter_of_other_tensors_than_the_one_before_is_refused(tmp_path, kind, model):
    async with served(kind, model) as (_, admin):
        await sync(admin, adapter(tmp_path, 4))
        wider = {A: np.zeros((3, IN), np.float32), B: np.zeros((OUT, 3), np.float32)}
        with pytest.raises(StorageError, match="does not fit the model that engine-0 serves"):
            await admin.prepare(adapter(tmp_path, 5, config={"peft_type": "LORA", "r": 3}, **wider))


async def test_a_truncated_adapter_or_one_with_a_whole_model_beside_it_is_refused(tmp_path, kind, model):
    async with served(kind, model) as (server, admin):
        four, five = adapter(tmp_path, 4), adapter(tmp_path, 5)
        file = Path(four.directory) / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(StorageError, match="was cut"):
            await admin.prepare(four)
        save_file({WEIGHT: np.zeros(1)}, Path(five.directory) / "model.safetensors")
        with pytest.raises(StorageError, match="beside an adapter"):
            await admin.prepare(five)
        assert not server.log.of("asked")


async def test_a_later_whole_model_is_refused_before_the_engine_hears_of_it_whatever_is_known_of_the_base(tmp_path, kind, model):
    async with FakeEngine(script=EngineScript(speaks=kind)) as server:
        settings = EngineSection(weight_transfer="lora", request_timeout_seconds=60.0)
        admin = admin_of("engine-0", EngineAddress(server.url, kind), settings)  # a trainer of the user's made version 0
        await sync(admin, model)
        await sync(admin, adapter(tmp_path, 1))
        asked = len(server.log.of("asked"))
        whole = Checkpoint(2, "abc-2", model.directory)
        with pytest.raises(StorageError, match=rf"{model.directory} holds no adapter_config\.json: .* each version but the first must be"):
            await admin.prepare(whole)
        with pytest.raises(StorageError, match="must be an adapter"):
            await admin.commit(whole)
        await admin.abandon()
        assert len(server.log.of("asked")) == asked
        assert await admin.label() == "abc-1"
        await sync(admin, adapter(tmp_path, 2))
        assert await admin.label() == "abc-2"
        await admin.close()


async def test_adapter_and_whole_model_are_not_taken_for_each_other(tmp_path, model):
    async with served("vllm", model) as (_, admin):
        whole = tmp_path / "3"
        whole.mkdir()
        save_file({WEIGHT: np.zeros((OUT, IN), np.float32)}, whole / "model.safetensors")
        with pytest.raises(StorageError, match="each version but the first must be an adapter"):
            await admin.prepare(Checkpoint(3, "abc-3", str(whole)))
    async with FakeEngine() as server:
        admin = admin_of("engine-0", EngineAddress(server.url, "vllm"), EngineSection())
        with pytest.raises(StorageError, match=r'set engine\.weight_transfer = "lora"'):
            await admin.prepare(adapter(tmp_path, 4))
        await admin.close()


@given(st.lists(st.integers(0, 10**6), unique=True), st.lists(st.text("abc-019 ", max_size=8)))
def test_the_adapters_of_a_lineage_are_those_with_its_numbers_in_order(numbers, others):
    ours = [f"run-7-{number}" for number in numbers]
    foreign = [f"x{other}" for other in others] + ["run-7-", "run-7-01", "run-7-1a", "run-71", "run-7-²"]
    mixed = [name for pair in zip(ours, foreign, strict=False) for name in pair] + ours[len(foreign) :] + foreign[len(ours) :]
    assert adapters_of("run-7", mixed) == [f"run-7-{number}" for number in sorted(numbers)]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_an_adapter_fits_if_its_outer_dimensions_are_the_modules_and_its_inner_ones_agree(rank, other, columns, rows):
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {A: ("F32", (rank, columns)), B: ("F32", (rows, other))}
    fits = rank == other and (rows, columns) == (OUT, IN)
    assert (misfit(tensors, rank, BASE) == "") == fits
    assert (misfit(tensors, None, None) == "") == (rank == other)
