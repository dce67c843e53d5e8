"""The external trainer of the examples keeps the contract, as headway's own side of it sees."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from headway.adapters.trainers.directory import DirectoryTrainer
from headway.formats.batch import read_batch
from headway.formats.manifest import publish, read_manifest, staging, verify, write_manifest
from headway.formats.run_directory import Ending, RunDirectory, RunInfo, save_run_info

SCRIPT = Path(__file__).parents[2] / "examples" / "external_trainer" / "trainer.py"
INFO = RunInfo(id="run", lineage="abc", headway_version="0", engine_version="0", trainer_version="0", seed=0, created=time.time())

pytestmark = pytest.mark.e2e


@pytest.fixture
def run(tmp_path: Path):
    directory = RunDirectory.create(tmp_path / "run")
    save_run_info(directory, INFO)
    yield directory
    directory.close()


@contextmanager
def training(run: RunDirectory, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """The example's process, publishing the weights of a checkpoint of one file; killed at the end."""
    checkpoint = directory / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    save_file({"weight": np.ones(3, np.float32)}, checkpoint / "model.safetensors")
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(run.path), str(checkpoint)], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def trainer(run: RunDirectory, tmp_path: Path):
    with training(run, tmp_path) as process:
        yield process


def write_batch(run: RunDirectory, k: int, *, versions: int, max_staleness: int = 2) -> None:
    """Publish a batch of one sample of four tokens, the last two of them in the loss."""
    mask = np.array([0, 0, 1, 1], np.uint8)
    arrays: dict[str, np.ndarray] = {
        "token_ids": np.arange(4, dtype=np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, np.float32(-0.5), np.float32(0)),
        "advantages": np.ones(4, np.float32),
        "versions": np.where(mask, versions, -1).astype(np.int32),
        "sample_offsets": np.array([0, 4]),
        "sample_rollout": np.zeros(1, np.int32),
        "sample_group": np.zeros(1, np.int32),
        "sample_length": np.full(1, 2, np.int32),
    }
    directory = staging(run.batch(k))
    save_file(arrays, directory / "batch.safetensors")
    facts: dict[str, Any] = {"batch": k, "max_staleness": max_staleness, "on_stale": "mask", "temperature": 1.0, "contract_version": 1}
    facts |= {"min_contributing_version": versions, "contributing_tokens": 2}
    facts |= {"arrays": {name: {"dtype": array.dtype.name, "shape": array.shape} for name, array in arrays.items()}}
    write_manifest(directory, kind="batch", lineage=INFO.lineage, id=k, extra=facts)
    publish(directory, run.batch(k))


async def test_it_makes_a_version_of_every_batch_and_ends_with_the_run(run: RunDirectory, trainer: subprocess.Popen[str]):
    ours = DirectoryTrainer(run, INFO.lineage, 0.01, lambda: None if trainer.poll() is None else "the example ended")
    for k in range(3):
        write_batch(run, k, versions=max(0, k - 2))
        read_batch(run.batch(k))  # what was written is a batch by the contract
        await ours.submit(k)
        checkpoint = await ours.checkpoint(k)
        assert (checkpoint.version, checkpoint.label) == (k + 1, f"abc-{k + 1}")
        state = read_manifest(run.trainer_state(k + 1))
        assert state is not None
        verify(run.trainer_state(k + 1), state)
        assert (state.kind, state.id, state.extra["batch"]) == ("trainer", k + 1, k)
        assert await ours.metrics(k) == {"batch": k, "loss": 0.5, "tokens": 2}
    save_run_info(run, msgspec.structs.replace(INFO, ended=Ending(0, "done", time.time())))
    assert trainer.wait(120) == 0


async def test_killed_and_started_again_it_goes_on_from_the_version_that_it_had_made(run: RunDirectory, tmp_path: Path):
    for k in range(2):
        with training(run, tmp_path) as trainer:
            ours = DirectoryTrainer(run, INFO.lineage, 0.01, lambda: None if trainer.poll() is None else "the example ended")
            write_batch(run, k, versions=k)
            await ours.submit(k)
            assert (await ours.checkpoint(k)).version == k + 1
        half = staging(run.trainer_state(k + 2))  # killed between a state and its weights
        write_manifest(half, kind="trainer", lineage=INFO.lineage, id=k + 2, extra={"batch": k + 1})
        publish(half, run.trainer_state(k + 2))


def test_it_refuses_a_batch_that_breaks_the_bound(run: RunDirectory, trainer: subprocess.Popen[str]):
    for k in range(3):
        write_batch(run, k, versions=0, max_staleness=1)
    assert trainer.wait(120) == 1
    assert json.loads(run.trainer_metric(1).read_bytes())["batch"] == 1
    assert not run.weight(3).exists()
