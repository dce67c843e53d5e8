"""Runs of headway against the real server: `headway run` as a person starts it, with the embedded trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from tiny_models import logprobs_under

from headway.formats.manifest import read_manifest
from headway.types import Checkpoint

RUN_SECONDS = 600.0


class Training:
    """A run under way."""

    def __init__(self, config: Path, directory: Path, *settings: str) -> None:
        self.directory = directory
        chosen = [f"run.directory={directory}", *settings]
        command = [sys.executable, "-m", "headway", "run", str(config), *(part for setting in chosen for part in ("--set", setting))]
        self.log = directory.parent / f"{directory.name}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=directory.parent, env=os.environ)
        self._deadline = time.monotonic() + RUN_SECONDS

    def until_batch(self, k: int) -> None:
        """Wait until batch `k` is on disk."""
        while not (self.directory / "batches" / f"{k:08d}").exists():
            assert self.process.poll() is None, self.tail()
            assert time.monotonic() < self._deadline, self.tail()
            time.sleep(0.05)

    def end(self) -> int:
        """Wait for the end; the exit code."""
        try:
            return self.process.wait(max(self._deadline - time.monotonic(), 1.0))
        finally:
            self.close()

    def close(self) -> None:
        """End it if it still runs, as Ctrl-C does, and then for good."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def rows(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """metrics.jsonl, or another file of rows."""
        return [json.loads(line) for line in (self.directory / name).read_text().splitlines()]

    def tail(self) -> str:
        """The end of what it said."""
        return self.log.read_text("utf-8", "replace")[-3000:]

    def logprob_differences(self, versions: Sequence[Checkpoint] = ()) -> npt.NDArray[np.float32]:
        """How far each sampled token's stored log-probability is from that of the version that its stamp names, in float32.

        Of all rollouts of batches whose versions are still on disk; or by the given `versions`, from 0.
        """
        return np.concatenate([self._differences_of(sample, versions) for sample in self._samples()])

    def written_by(self) -> set[int]:
        """The versions that have written the tokens of all batches."""
        return {version for sample in self._samples() for version in sample["span_version"]}

    def _samples(self) -> Iterator[dict[str, Any]]:
        for batch in sorted((self.directory / "batches").iterdir()):
            for rollout in pq.read_table(batch / "rollouts.parquet").to_pylist():
                yield from rollout["samples"]

    def _differences_of(self, sample: dict[str, Any], versions: Sequence[Checkpoint]) -> npt.NDArray[np.float32]:
        sampled = np.array(sample["sampled_mask"])
        stored = np.array(sample["logprobs"], np.float32)[sampled]
        starts = [*sample["span_start"], len(stored)]
        found = np.zeros(len(stored), np.float32)
        for number, version in enumerate(sample["span_version"]):
            part = slice(starts[number], starts[number + 1])
            checkpoint = versions[version] if versions else self.checkpoint(version)
            ids = sample["token_ids"]
            expected = logprobs_under(checkpoint, ids[:1], ids[1:])[sampled[1:]]
            found[part] = np.abs(expected[part] - stored[part])
        return found

    def checkpoint(self, version: int) -> Checkpoint:
        """A version that the run has published."""
        directory = self.directory / "weights" / f"{version:08d}"
        manifest = read_manifest(directory)
        assert manifest is not None, directory
        return Checkpoint(version, f"{manifest.lineage}-{version}", str(directory))
