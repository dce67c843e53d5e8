"""Checkpoints that never reach an engine, of either kind: what is missing, cut short, of another shape or type is refused before."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from synced_engines import KINDS, checkpoint, generate, served, sync

from headway.adapters.engines.held import HeldCheckpoints, full_checkpoint
from headway.errors import StorageError
from headway.types import Checkpoint


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def bad_missing(good: Checkpoint) -> str:
    (Path(good.directory) / "model.safetensors").unlink()
    return "holds no"


def bad_truncated(good: Checkpoint) -> str:
    file = Path(good.directory) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    return "was cut"


def bad_lacking(good: Checkpoint) -> str:
    save_file({"version": np.array([5], np.int64)}, Path(good.directory) / "model.safetensors")
    return "tensor weight is missing"


def bad_shape(good: Checkpoint) -> str:
    tensors: dict[str, Any] = {"version": np.array([5], np.int64), "weight": np.zeros((3, 2), np.float32)}
    save_file(tensors, Path(good.directory) / "model.safetensors")
    return "tensor weight is"


def bad_type(good: Checkpoint) -> str:
    tensors: dict[str, Any] = {"version": np.array([5], np.int64), "weight": np.zeros((2, 3), np.float16)}
    save_file(tensors, Path(good.directory) / "model.safetensors")
    return "tensor weight is"


BAD = [bad_missing, bad_truncated, bad_lacking, bad_shape, bad_type]


@pytest.mark.parametrize("spoil", BAD)
async def test_a_bad_checkpoint_is_refused_before_the_engine_hears_of_it_and_the_engine_serves_on(tmp_path, kind, spoil):
    async with served(kind) as (server, admin):
        await sync(admin, checkpoint(tmp_path, 4))
        bad = checkpoint(tmp_path, 5)
        says, asked = spoil(bad), len(server.log.of("asked"))
        with pytest.raises(StorageError, match=says):
            await admin.prepare(bad)
        assert len(server.log.of("asked")) == asked
        assert not server.paused
        await generate(server, kind, 4)
        assert [label for label, *_ in server.log.of("finished")[0]["labels"]] == ["abc-4"]
        await sync(admin, checkpoint(tmp_path, 6))
        assert await admin.label() == "abc-6"


@pytest.mark.parametrize("published", [False, True], ids=["a user's model", "weights of another run"])
@pytest.mark.parametrize("spoil", [bad_missing, bad_truncated, bad_lacking, bad_shape])
async def test_the_first_checkpoint_is_held_against_the_model_that_the_run_starts_from(tmp_path, kind, spoil, published):
    model = checkpoint(tmp_path, 0, probe=False)
    if not published:
        (Path(model.directory) / "manifest.json").unlink()
    async with served(kind, model=model.directory) as (server, admin):
        bad = checkpoint(tmp_path, 5)
        with pytest.raises(StorageError, match=spoil(bad)):
            await admin.prepare(bad)
        assert not server.log.of("asked")
        await sync(admin, checkpoint(tmp_path, 6, weight=np.zeros((2, 3), np.float16)))  # a trainer's own type: engines convert


async def test_what_a_run_makes_of_the_weights_of_another_may_be_of_another_type(tmp_path):
    """The run starts by serving them: `model.path` is what another has published in float32, and its trainer writes bfloat16."""
    model, first, second = (
        Path(checkpoint(tmp_path, version, weight=np.ones((2, 3), kind)).directory)
        for version, kind in enumerate((np.float32, np.float16, np.float32))
    )
    held = HeldCheckpoints("engine-0", str(model), lambda directory, _: full_checkpoint(directory))
    try:
        await held.offer(model)
        held.serve()
        await held.offer(first)
        held.serve()
        with pytest.raises(StorageError, match="tensor weight is"):  # from here on the type is the trainer's own
            await held.offer(second)
    finally:
        held.close()
