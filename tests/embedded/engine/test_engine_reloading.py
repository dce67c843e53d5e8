"""Weights are put in place of others over HTTP: served as by a fresh engine, or refused by name while the old ones serve on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from engine_client import Client, engine_on  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from headway import __version__  # noqa: E402

pytestmark = pytest.mark.torch


async def test_a_reload_swaps_weights_and_label_as_a_fresh_engine_would_serve_them(engine: Client, make_checkpoint):
    second = make_checkpoint("qwen3", 1)
    before = await engine.generate([1, 8], seed=4, max_tokens=20, ignore_eos=True)
    await engine.post("/pause?mode=keep")
    status, _ = await engine.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(second)}})
    assert status == 200
    assert await engine.get("/weight_info") == (200, {"weight_version": "ab12cd-0"})
    assert await engine.get("/version") == (200, {"version": __version__, "software": "headway"})
    await engine.post("/update_weight_version", {"new_version": "ab12cd-1"})
    await engine.post("/reset_prefix_cache")
    await engine.post("/resume")
    assert await engine.get("/weight_info") == (200, {"weight_version": "ab12cd-1"})
    after = await engine.generate([1, 8], seed=4, max_tokens=20, ignore_eos=True)
    assert after["weight_versions"] == [{"version": "ab12cd-1", "start": 0, "end": 20}]
    async with engine_on(second, label="ab12cd-1") as fresh:
        assert await fresh.generate([1, 8], seed=4, max_tokens=20, ignore_eos=True) == after
    assert after["logprobs"] != before["logprobs"]


def spoil(directory: Path, how: str) -> str:
    """Spoil a copy of a checkpoint; return a word that the refusal must hold."""
    file = directory / "model.safetensors"
    if how == "missing directory":
        shutil.rmtree(directory)
        return "is no directory"
    if how == "truncated file":
        file.write_bytes(file.read_bytes()[:-100])
        return "header promises"
    if how == "cut inside the header":
        file.write_bytes(file.read_bytes()[:200])
        return "truncated"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "lacking tensor":
        del tensors[name]
    elif how == "lacking head":
        del tensors[name := "lm_head.weight"]
    elif how == "wrong type":
        tensors[name] = tensors[name].to(torch.int8)
    elif how == "foreign tensor":
        tensors[name := "model.layers.2.mlp.up_proj.weight"] = torch.zeros(3)
    else:
        tensors[name] = torch.zeros(128, 65)
    save_file(tensors, file, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize(
    "how",
    [
        "missing directory",
        "truncated file",
        "cut inside the header",
        "lacking tensor",
        "lacking head",
        "foreign tensor",
        "wrong shape",
        "wrong type",
    ],
)
async def test_a_bad_checkpoint_is_refused_by_name_and_the_old_weights_serve_on(engine: Client, make_checkpoint, tmp_path: Path, how):
    directory = tmp_path / "bad"
    shutil.copytree(make_checkpoint("qwen3", 1), directory)
    says = spoil(directory, how)
    before = await engine.generate([1, 8], seed=4, max_tokens=20)
    await engine.post("/pause?mode=keep")
    status, answer = await engine.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
    assert status == 400
    assert says in answer["error"]["message"]
    assert str(directory) in answer["error"]["message"]
    await engine.post("/resume")
    assert (await engine.get("/health"))[0] == 200
    assert await engine.generate([1, 8], seed=4, max_tokens=20) == before


async def test_other_rpc_methods_are_refused(engine: Client):
    status, answer = await engine.post("/collective_rpc", {"method": "sleep", "kwargs": {}})
    assert status == 400
    assert "reload_weights" in answer["error"]["message"]
