"""The engine given deltas: with the right base it serves what the complete checkpoint holds; any other is refused and nothing changes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from headway.embedded.engine.model import SlotModel, load_model  # noqa: E402
from headway.embedded.engine.weights import CheckpointRefused  # noqa: E402
from headway.errors import StorageError  # noqa: E402
from headway.formats.delta import TENSORS, write_delta  # noqa: E402

pytestmark = pytest.mark.torch


def opened(directory: Path) -> SlotModel:
    return load_model(directory, device=torch.device("cpu"), dtype=torch.float32, max_rows=2, max_context_tokens=0)


def held(model: SlotModel) -> dict[str, Any]:
    """The weights that the engine has, by name."""
    return {name: tensor.clone() for name, tensor in model._model.state_dict().items()}


def assert_serves(model: SlotModel, checkpoint: Path) -> None:
    for name, tensor in load_file(checkpoint / TENSORS).items():
        assert torch.equal(held(model)[name], tensor), name


def successor(base: Path, directory: Path, *changed: str) -> Path:
    """A checkpoint beside its base in which the tensors whose names hold a word of `changed` are others."""
    shutil.copytree(base, directory)
    tensors = load_file(base / TENSORS)
    for name in tensors:
        if any(word in name for word in changed):
            tensors[name] = tensors[name] + 0.5
    save_file(tensors, directory / TENSORS, metadata={"format": "pt"})
    return directory


def delta(base: Path, checkpoint: Path, out: Path, version: int = 1) -> Path:
    write_delta(base, checkpoint, out, lineage="ab12", base_version=version - 1, version=version)
    assert out.exists()
    return out


@pytest.fixture
def base(tiny_qwen3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_qwen3, tmp_path / "base"))


@pytest.mark.parametrize("changed", ["norm", "self_attn.q_proj", "lm_head", "embed_tokens"])
def test_a_delta_over_its_base_is_the_checkpoint(base: Path, tmp_path: Path, changed: str):
    model = opened(base)
    next_one = successor(base, tmp_path / "next", changed)
    model.loader.load(delta(base, next_one, tmp_path / "delta"))
    assert_serves(model, next_one)


def test_deltas_follow_each_other_without_the_base_on_disk(base: Path, tmp_path: Path):
    model = opened(base)
    one = successor(base, tmp_path / "1", "norm")
    two = successor(one, tmp_path / "2", "mlp.up")
    model.loader.load(delta(base, one, tmp_path / "d1"))
    shutil.rmtree(base)
    model.loader.load(delta(one, two, tmp_path / "d2", 2))
    assert_serves(model, two)


def test_a_delta_follows_a_complete_checkpoint(base: Path, tmp_path: Path):
    model = opened(base)
    one = successor(base, tmp_path / "1", "norm", "lm_head", "layers")
    two = successor(one, tmp_path / "2", "norm")
    model.loader.load(one)
    model.loader.load(delta(one, two, tmp_path / "d2", 2))
    assert_serves(model, two)


def test_a_delta_from_another_version_is_refused_and_nothing_changes(base: Path, tmp_path: Path):
    model = opened(base)
    one = successor(base, tmp_path / "1", "lm_head")
    two = successor(one, tmp_path / "2", "norm")
    with pytest.raises(StorageError, match=r"from other weights than these: lm_head\.weight differs"):
        model.loader.load(delta(one, two, tmp_path / "d2", 2))
    assert_serves(model, base)
    model.loader.load(two)
    assert_serves(model, two)


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_a_base_that_is_not_on_disk_as_it_was_loaded_vouches_for_nothing(base: Path, tmp_path: Path, how: str):
    model = opened(base)
    next_one = successor(base, tmp_path / "next", "norm")
    out = delta(base, next_one, tmp_path / "delta")
    before = held(model)
    if how == "gone":
        shutil.rmtree(base)
    else:
        (base / TENSORS).unlink()  # written over, the file would take the mapped weights with it
        shutil.copy(next_one / TENSORS, base / TENSORS)
    with pytest.raises(StorageError):
        model.loader.load(out)
    assert all(torch.equal(tensor, before[name]) for name, tensor in held(model).items())
    model.loader.load(next_one)
    assert_serves(model, next_one)


def test_a_bit_that_is_not_as_written_is_refused_and_nothing_changes(base: Path, tmp_path: Path):
    model = opened(base)
    out = delta(base, successor(base, tmp_path / "next", "norm"), tmp_path / "delta")
    data = bytearray((out / TENSORS).read_bytes())
    data[-1] ^= 1
    (out / TENSORS).write_bytes(data)
    with pytest.raises(StorageError, match=r"is not what delta\.json says"):
        model.loader.load(out)
    assert_serves(model, base)


def test_tensors_that_are_missing_without_a_delta_json_are_refused_as_ever(base: Path, tmp_path: Path):
    model = opened(base)
    out = delta(base, successor(base, tmp_path / "next", "norm"), tmp_path / "delta")
    (out / "delta.json").unlink()
    with pytest.raises(CheckpointRefused, match="lacks"):
        model.loader.load(out)
    assert_serves(model, base)


def test_a_delta_whose_version_lacks_a_tensor_of_the_model_is_refused(base: Path, tmp_path: Path):
    model = opened(base)
    poor = tmp_path / "poor"
    shutil.copytree(base, poor)
    tensors = load_file(base / TENSORS)
    del tensors["lm_head.weight"]
    save_file(tensors, poor / TENSORS)
    next_one = successor(poor, tmp_path / "next", "norm")
    with pytest.raises(CheckpointRefused, match="lacks lm_head"):
        model.loader.load(delta(poor, next_one, tmp_path / "delta"))


def test_a_model_that_is_converted_when_it_is_loaded_takes_complete_checkpoints_only(make_checkpoint: Any, tmp_path: Path):
    base = make_checkpoint("qwen3_moe", 0)
    model = opened(base)
    next_one = successor(base, tmp_path / "next", "norm")
    with pytest.raises(CheckpointRefused, match="takes complete checkpoints only"):
        model.loader.load(delta(base, next_one, tmp_path / "delta"))
    model.loader.load(next_one)


def test_a_tied_head_follows_the_embeddings_of_a_delta(make_checkpoint: Any, tmp_path: Path):
    base = make_checkpoint("qwen3_tied", 0)
    model = opened(base)
    next_one = successor(base, tmp_path / "next", "embed_tokens")
    model.loader.load(delta(base, next_one, tmp_path / "delta"))
    weights = held(model)
    assert torch.equal(weights["lm_head.weight"], load_file(next_one / TENSORS)["model.embed_tokens.weight"])
