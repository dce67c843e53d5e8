"""An external trainer that publishes LoRA adapters: the n-th batch makes the adapter that is drawn from n.

    python adapter_trainer.py RUN_DIRECTORY BASE_CHECKPOINT

It learns nothing, so that a test knows every version; it refuses what breaks the contract, and ends when the run has ended.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

from tiny_models import write_adapter

from headway.formats.batch import read_batch
from headway.formats.manifest import publish, read_manifest, staging, write_manifest
from headway.formats.run_directory import RunDirectory, load_run_info
from headway.types import Checkpoint


def main(run: RunDirectory, base: Checkpoint) -> None:
    """Serve batches until the run says that it has ended."""
    while not (run.path / "run.json").exists():
        time.sleep(0.1)
    lineage = load_run_info(run).lineage
    for directory in (run.trainer, run.trainer_metrics):
        directory.mkdir(parents=True, exist_ok=True)
    for k in itertools.count():
        while (manifest := read_manifest(run.batch(k))) is None or manifest.lineage != lineage:
            if load_run_info(run).ended:
                return
            time.sleep(0.02)
        read_batch(run.batch(k))
        state = staging(run.path / "trainer" / f"{k + 1:08d}")
        write_manifest(state, kind="trainer", lineage=lineage, id=k + 1, extra={"batch": k})
        publish(state, run.path / "trainer" / f"{k + 1:08d}")
        write_adapter(run.weights, k + 1, base, lineage=lineage)


if __name__ == "__main__":
    main(RunDirectory(Path(sys.argv[1])), Checkpoint(0, "base", sys.argv[2]))
