"""The double lock in a real run: a batch that was changed between shipper and trainer ends the run by name, and trains nothing."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from real_runs import Bench
from safetensors.numpy import load_file, save_file

pytestmark = [pytest.mark.e2e, pytest.mark.torch]


def make_older(batch: Path) -> tuple[int, int]:
    """Stamp a token in the loss one version older than the bound allows, and let the manifest vouch for it; return (row, version)."""
    facts = json.loads((batch / "manifest.json").read_bytes())
    arrays = {name: array.copy() for name, array in load_file(batch / "batch.safetensors").items()}
    token = np.flatnonzero(arrays["loss_mask"])[-1]
    arrays["versions"][token] = version = facts["batch"] - facts["max_staleness"] - 1
    save_file(arrays, batch / "batch.safetensors")
    data = (batch / "batch.safetensors").read_bytes()
    facts["files"]["batch.safetensors"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (batch / "manifest.json").write_text(json.dumps(facts))
    sample = np.searchsorted(arrays["sample_offsets"], token, side="right") - 1
    return int(arrays["sample_rollout"][sample]), version


def test_a_batch_that_was_made_staler_on_its_way_ends_the_run_by_row_and_version(bench: Bench):
    run = bench.start("run.steps=100000", "rollout.max_staleness=1", "environment.entry=world:slow", attached=False)
    run.until_batch(2)
    trainer = run.child("headway trainer")
    trainer.suspend()
    trained = max(int(weights.name) for weights in (run.directory / "weights").iterdir() if weights.name.isdecimal())
    k = trained + 1  # batch `trained` may be in its memory already
    run.until_batch(k)
    row, version = make_older(run.directory / "batches" / f"{k:08d}")
    trainer.resume()
    ended = run.end(sabotaged=True)
    assert ended.code != 0
    assert f"batch {k}" in ended.last_error
    assert f"version {version} (row {row} of rollouts.parquet)" in ended.last_error
    assert ended.recorded["code"] == ended.code
    assert not (run.directory / "weights" / f"{k + 1:08d}").exists()
