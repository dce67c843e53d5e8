"""Checkpoints that would break a real vLLM, or that it would load in silence: refused before it is asked, and it serves on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from pushing import assert_right, differences, fleet, prompts
from real_server import RealServer
from tiny_models import WEIGHTS_FILE, tensors_of, write_version

from headway.errors import EngineFailed, StorageError
from headway.types import Checkpoint

LACKING = "model.layers.1.mlp.up_proj.weight"


def _missing(good: Checkpoint, directory: Path) -> Checkpoint:
    return dataclasses.replace(write_version(directory, 2), directory=str(directory / "nowhere"))


def _truncated(good: Checkpoint, directory: Path) -> Checkpoint:
    checkpoint = write_version(directory, 2)
    path = Path(checkpoint.directory) / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-1000])
    return checkpoint


def _lacks_a_tensor(good: Checkpoint, directory: Path) -> Checkpoint:
    return write_version(directory, 2, {name: tensor for name, tensor in tensors_of(good).items() if name != LACKING})


def _wrong_shape(good: Checkpoint, directory: Path) -> Checkpoint:
    tensors = tensors_of(good)
    return write_version(directory, 2, tensors | {LACKING: tensors[LACKING][:-8].contiguous()})


@pytest.mark.parametrize("spoilt", [_missing, _truncated, _lacks_a_tensor, _wrong_shape])
async def test_is_refused_and_the_old_weights_are_served(
    server: RealServer, versions: list[Checkpoint], tmp_path: Path, spoilt: Callable[[Checkpoint, Path], Checkpoint]
) -> None:
    [prompt] = prompts(1, 32)
    async with fleet(server.url) as it:
        await it.push(versions[1])
        with pytest.raises(StorageError):
            await it.push(spoilt(versions[2], tmp_path))
        await it.engine.abandon()
        assert server.healthy()
        assert not server.paused()
        assert server.label() == versions[1].label
        written = await it.generate(prompt, max_tokens=64)
        assert written.spans == [(0, 1)]
        assert_right(differences(prompt, written, versions))


async def test_one_that_vanishes_after_it_was_checked_is_repaired_by_the_next(
    server: RealServer, versions: list[Checkpoint], tmp_path: Path
) -> None:
    [prompt] = prompts(1, 32)
    doomed = write_version(tmp_path, 2)
    async with fleet(server.url) as it:
        await it.push(versions[1])
        await it.engine.prepare(doomed)
        Path(doomed.directory).rename(tmp_path / "elsewhere")
        with pytest.raises(EngineFailed):
            await it.engine.transfer(doomed)
        assert server.paused()  # it has no weights: nothing may be asked of it
        await it.push(versions[3])
        assert not server.paused()
        written = await it.generate(prompt, max_tokens=64)
        assert written.spans == [(0, 3)]
        assert_right(differences(prompt, written, versions))
