"""The smallest trainer that keeps headway's contract: it checks every batch, learns nothing, and publishes the weights it began with.

    python examples/external_trainer/trainer.py RUN_DIRECTORY CHECKPOINT_DIRECTORY

It imports nothing of headway: the contract is files. Put your optimiser where `learn` is called. A trainer in Python may use
`headway.formats` (batch, manifest) instead of the helpers below; neither needs torch.
"""

import hashlib
import itertools
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Json = dict[str, Any]


def read_json(path: Path) -> Json | None:
    """Return a JSON file that may not be there yet."""
    return json.loads(path.read_bytes()) if path.exists() else None


def publish(final: Path, files: dict[str, bytes], **manifest: Any) -> None:
    """Make a directory appear whole under its name: files, manifest, fsync, rename."""
    staging = final.with_name(f".tmp-{final.name}-{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    listed = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    manifest |= {"format_version": 1, "files": listed}
    for name, data in {**files, "manifest.json": json.dumps(manifest).encode()}.items():
        with (staging / name).open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())
    staging.rename(final)


def newest_version(run: Path) -> int:
    """Return the version to go on from, and remove what a killed trainer wrote of the next: a state without its weights is none."""
    newest = max((int(path.parent.name) for path in (run / "weights").glob("[0-9]*/manifest.json")), default=0)
    for state in (run / "trainer").glob("[0-9]*"):
        if int(state.name) > newest:
            shutil.rmtree(state)
    return newest


def checked(directory: Path, facts: Json, version: int) -> Json:
    """Return the arrays of a batch: the second half of the double lock. Refusing by exception ends the process non-zero."""
    for name, entry in facts["files"].items():
        if hashlib.sha256((directory / name).read_bytes()).hexdigest() != entry["sha256"]:
            raise SystemExit(f"{directory / name}: damaged")
    arrays = load_file(directory / "batch.safetensors")
    versions = arrays["versions"][arrays["loss_mask"] == 1]
    staleness = version - versions[versions >= 0]  # replayed and external rollouts have no version
    if (
        facts["batch"] != version
        or staleness.min(initial=0) < 0
        or (facts["on_stale"] != "train" and staleness.max(initial=0) > facts["max_staleness"])
    ):
        raise SystemExit(f"{directory}: not a batch that version {version} may train on")
    return arrays


def learn(arrays: Json) -> Json:
    """Measure what a policy gradient would weigh, and leave the weights alone."""
    mask = arrays["loss_mask"] == 1
    return {"loss": float(-(arrays["advantages"][mask] * arrays["logprobs"][mask]).mean()), "tokens": int(np.count_nonzero(mask))}


def main(run: Path, checkpoint: Path) -> None:
    """Serve batches until the run says that it has ended."""
    while (info := read_json(run / "run.json")) is None:
        time.sleep(0.1)
    lineage = info["lineage"]
    weights = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file() and path.name != "manifest.json"}
    for k in itertools.count(newest_version(run)):
        batch = run / "batches" / f"{k:08d}"
        while (facts := read_json(batch / "manifest.json")) is None or facts["lineage"] != lineage:
            if (read_json(run / "run.json") or {}).get("ended"):
                return
            time.sleep(0.01)
        measured = learn(checked(batch, facts, version=k))
        metrics = run / "trainer" / "metrics" / f"{k:08d}.json"
        metrics.with_suffix(".tmp").write_text(json.dumps({"batch": k, **measured}))
        metrics.with_suffix(".tmp").rename(metrics)
        publish(run / "trainer" / f"{k + 1:08d}", {"state.json": b"{}"}, kind="trainer", lineage=lineage, id=k + 1, batch=k)
        publish(run / "weights" / f"{k + 1:08d}", weights, kind="weights", lineage=lineage, id=k + 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
