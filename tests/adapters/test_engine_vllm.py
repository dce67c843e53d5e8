"""The administrative client of vLLM-speaking engines, against a real HTTP server."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from scripted_engine import Break, Hold, ScriptedEngine, Status, Tokens

from headway.adapters.engines.vllm.admin import VllmEngine
from headway.errors import EngineFailed, StorageError
from headway.formats.hold import is_held
from headway.settings import EngineSection
from headway.types import Checkpoint


def checkpoint(directory: Path, version: int = 4, **tensors: np.ndarray) -> Checkpoint:
    directory.mkdir(exist_ok=True)
    save_file(tensors or {"weight": np.zeros((2, 3), np.float32)}, directory / "model.safetensors")
    return Checkpoint(version, f"abc-{version}", str(directory))


async def sync(engine: VllmEngine, weights: Checkpoint) -> None:
    await engine.prepare(weights)
    await engine.transfer(weights)
    await engine.commit(weights)


@pytest.mark.parametrize(
    ("settings", "pause", "resets"),
    [
        ({}, "mode=keep&clear_cache=true", False),
        ({"recompute_kv": False}, "mode=keep&clear_cache=false", True),
        ({"weight_sync": "wait"}, "mode=wait&clear_cache=true", False),
        ({"weight_sync": "abort_resume", "recompute_kv": False}, "mode=abort&clear_cache=true", False),
    ],
)
async def test_a_sync_pauses_loads_labels_and_serves_again(tmp_path, settings, pause, resets):
    weights = checkpoint(tmp_path / "weights")
    async with ScriptedEngine(Tokens([1])) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection(**settings))
        assert await engine.label() == "default"
        await sync(engine, weights)
        assert await engine.label() == "abc-4"
        await engine.close()
    assert server.admin[1:-1] == [
        f"/pause?{pause}",
        f"/collective_rpc reload_weights {weights.directory}",
        "/update_weight_version",
        *(["/reset_prefix_cache"] if resets else []),
        "/resume",
        "/weight_info",
    ]


def damage_nothing_there(file: Path) -> None:
    file.unlink()


def damage_truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def damage_header(file: Path) -> None:
    file.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00 not a header   ")


@pytest.mark.parametrize("damage", [damage_nothing_there, damage_truncated, damage_header])
async def test_a_damaged_checkpoint_never_reaches_the_engine(tmp_path, damage):
    weights = checkpoint(tmp_path / "weights")
    damage(tmp_path / "weights" / "model.safetensors")
    async with ScriptedEngine(Tokens([1])) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection())
        with pytest.raises(StorageError, match="safetensors"):
            await engine.prepare(weights)
    assert server.admin == []


async def test_a_checkpoint_that_lacks_a_tensor_of_the_served_one_never_reaches_the_engine(tmp_path):
    whole = checkpoint(tmp_path / "4", a=np.zeros(2, np.float32), b=np.zeros(2, np.float32))
    lacking = checkpoint(tmp_path / "5", 5, a=np.zeros(2, np.float32))
    async with ScriptedEngine(Tokens([1])) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection())
        await sync(engine, whole)
        calls = len(server.admin)
        with pytest.raises(StorageError, match="does not fit the model that engine-0 serves: tensor b is missing"):
            await engine.prepare(lacking)
    assert len(server.admin) == calls


async def test_a_failed_load_is_tried_again_and_then_named_with_its_answer(tmp_path):
    weights = checkpoint(tmp_path / "weights")
    async with ScriptedEngine(Tokens([1])) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection(), retries=1)
        server.refusals["/collective_rpc"] = [Status(500, "no memory")]
        await engine.transfer(weights)
        server.refusals["/collective_rpc"] = [Status(500, "no memory"), Break()]
        with pytest.raises(EngineFailed, match=r"engine-0: POST http://127.*/collective_rpc failed"):
            await engine.transfer(weights)
        server.refusals["/collective_rpc"] = [Status(400, "no such method")]
        with pytest.raises(EngineFailed, match="answered 400: no such method"):
            await engine.transfer(weights)


async def test_an_engine_that_has_the_weights_is_only_made_sure_to_serve_them_and_they_are_held(tmp_path):
    weights = checkpoint(tmp_path / "weights")
    (tmp_path / "weights" / "manifest.json").write_text("{}")
    async with ScriptedEngine(Tokens([1]), label="abc-4") as server:
        server.paused = True  # whoever gave it the weights was killed before he had resumed it
        engine = VllmEngine("engine-0", server.url, EngineSection())
        await engine.commit(weights)
        assert not server.paused
        assert not any("reload_weights" in call for call in server.admin)
        assert is_held(tmp_path / "weights")
        await engine.close()
        assert not is_held(tmp_path / "weights")


async def test_a_cache_that_the_engine_did_not_reset_is_not_taken_for_reset(tmp_path):
    weights = checkpoint(tmp_path / "weights")
    async with ScriptedEngine(Tokens([1])) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection(recompute_kv=False))
        server.refusals["/reset_prefix_cache"] = [Status(200, '{"success": false}')]
        await sync(engine, weights)  # requests hold it: asked again, with them
        server.refusals["/reset_prefix_cache"] = [Status(200, '{"success": false}')] * 2
        with pytest.raises(EngineFailed, match=r'did not reset its prefix cache: {"success": false}'):
            await sync(engine, weights)
        await sync(engine, weights)
        await engine.close()


async def test_an_engine_that_keeps_its_old_label_is_not_believed(tmp_path):
    weights = checkpoint(tmp_path / "weights")
    async with ScriptedEngine(Tokens([1]), label="abc-3") as server:
        engine = VllmEngine("engine-0", server.url, EngineSection())
        server.refusals["/update_weight_version"] = [Status(200, "{}")]
        with pytest.raises(EngineFailed, match='serves "abc-3"'):
            await sync(engine, weights)


async def test_a_call_that_is_never_answered_is_given_up_at_its_limit(tmp_path):
    weights = checkpoint(tmp_path / "weights")
    async with ScriptedEngine(Tokens([1])) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection(request_timeout_seconds=0.2))
        server.refusals["/pause"] = [Hold(asyncio.Event())]
        with pytest.raises(EngineFailed, match=r"not answered within 0\.2 s"):
            await engine.prepare(weights)


async def test_abandon_resumes_and_never_raises(tmp_path):
    weights = checkpoint(tmp_path / "weights")
    async with ScriptedEngine(Tokens([1])) as server:
        engine = VllmEngine("engine-0", server.url, EngineSection(request_timeout_seconds=4.0))
        await engine.prepare(weights)
        assert server.paused
        await engine.abandon()
        assert not server.paused
        server.refusals["/resume"] = [Hold(asyncio.Event())]
        await engine.abandon()
    await engine.abandon()  # nothing listens any more


@pytest.mark.parametrize(
    ("status", "body", "count"),
    [
        (
            200,
            '# HELP vllm:generation_tokens_total x\n# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{m="a b"} 12',
            12,
        ),
        (200, 'vllm:generation_tokens_total{engine="0"} 1.5e+06\nvllm:generation_tokens_total{engine="1"} 3.0\n', 1_500_003),
        (200, "vllm:generation_tokens_total 0\nvllm:generation_tokens_total_created 5\n", 0),
        (200, "vllm:prompt_tokens_total 7\n", None),
        (404, "no such path", None),
    ],
)
async def test_the_count_of_sampled_tokens_is_read_from_the_metrics(status, body, count):
    async with ScriptedEngine(Tokens([1])) as server:
        server.refusals["/metrics"] = [Status(status, body)]
        engine = VllmEngine("engine-0", server.url, EngineSection())
        assert await engine.sampled_tokens() == count
        await engine.close()


async def test_an_engine_that_cannot_be_asked_for_its_count_says_so():
    async with ScriptedEngine(Tokens([1])) as server:
        server.refusals["/metrics"] = [Break()] * 5
        engine = VllmEngine("engine-0", server.url, EngineSection())
        with pytest.raises(EngineFailed, match=r"engine-0: .*/metrics cannot be read"):
            await engine.sampled_tokens()
        await engine.close()
