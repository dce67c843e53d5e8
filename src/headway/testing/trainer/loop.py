"""The fake trainer: the directory contract without a model. It checks every batch as a trainer must, learns nothing, publishes versions.

It takes up the newest complete version at each start, as a real one does, and again when the run changes its lineage. Its log tells

    started {version, lineage}   consumed {k, sha, lineage, min_version, contributing, prompts, groups}   published {version}
    stalled {k}   died {k}   refused {k, why}   half_written {version}   retired {version}   kept {version, why}   ended {version}

`sha` is of the batch's tensors file: the same batch shipped again has the same.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from headway.errors import HeadwayError
from headway.formats.batch import RECORDS, TENSORS, TrainerBatch, read_batch
from headway.formats.files import strict_json, write_atomically
from headway.formats.hold import unheld
from headway.formats.manifest import publish, read_manifest, staging, write_manifest
from headway.formats.run_directory import RunDirectory, numbered
from headway.testing.log import FakeLog
from headway.testing.model import WEIGHTS_FILE, side_files, size_of, weights
from headway.testing.trainer.script import TrainerScript

POLL_SECONDS = 0.01
_SIDE_FILES = (".json", ".jinja")


class TrainerRefused(HeadwayError):
    """The fake trainer refuses a batch, as the contract or its script says."""


class TrainerLoop:
    """One trainer of a run. `run` trains until the run ends, or `stop` is set; `dies` ends whatever runs it, as kill -9 would."""

    def __init__(self, run: Path, script: TrainerScript, log: FakeLog, *, dies: Callable[[], None]) -> None:
        self.version = -1
        self._run = RunDirectory(run)
        self._script = script
        self._log = log
        self._started = time.time()
        self._lineage = ""
        self._steps = 0
        self._dies = dies
        self._side_files: dict[str, bytes] = {}
        self._foreign: dict[str, bytes] = {}  # weights that are none of ours: published as they are
        self._size = 16

    def run(self, stop: threading.Event) -> None:
        """Serve the run, waiting for its directory first."""
        while not stop.is_set() and not self._ended():
            if self._lineage_now() != self._lineage:
                self._take_up()
                continue
            batch = self._run.batch(self.version)
            manifest = read_manifest(batch) if batch.exists() else None
            if manifest is None or manifest.lineage != self._lineage:
                stop.wait(POLL_SECONDS)
            elif not self._step(batch, stop):
                break
        self._log.add("ended", version=self.version)

    # ---------------------------------------------------------------------------------------------------------------------- one version

    def _step(self, directory: Path, stop: threading.Event) -> bool:
        """Train one batch; False: told to stop meanwhile."""
        script, k = self._script, self.version
        if k == script.stall_at:
            self._log.add("stalled", k=k)
            stop.wait(script.stall_seconds or None)
        if stop.is_set():
            return False
        batch = self._checked(directory)
        rows = pq.read_table(directory / RECORDS, columns=["prompt_id", "group_id", "trained"]).to_pylist()
        self._log.add(
            "consumed",
            k=k,
            lineage=self._lineage,
            sha=hashlib.sha256((directory / TENSORS).read_bytes()).hexdigest(),
            min_version=batch.min_contributing_version,
            contributing=batch.contributing_tokens,
            prompts=sorted({row["prompt_id"] for row in rows}),
            groups=sorted({row["group_id"] for row in rows}),
        )
        if k == script.die_at and self._deaths() < script.deaths:
            self._die(k)
        if script.step_seconds and stop.wait(script.step_seconds):
            return False
        self._report(batch)
        self._publish(k + 1, stop)
        self._retire()
        return True

    def _checked(self, directory: Path) -> TrainerBatch:
        """Read a batch through the double lock."""
        k = self.version
        try:
            if k == self._script.refuse_at:
                raise TrainerRefused(f"batch {k}: refused by the script")
            batch = read_batch(directory)
            if batch.k != k:
                raise TrainerRefused(f"batch {batch.k} lies where batch {k} should")
        except HeadwayError as error:
            self._log.add("refused", k=k, why=str(error))
            raise
        return batch

    def _report(self, batch: TrainerBatch) -> None:
        self._run.trainer_metrics.mkdir(parents=True, exist_ok=True)
        row = {"batch": batch.k, "loss": 0.0, "step_seconds": self._script.step_seconds, "tokens": batch.contributing_tokens}
        write_atomically(self._run.trainer_metric(batch.k), strict_json(row))

    def _publish(self, version: int, stop: threading.Event) -> None:
        """Make a version, as scripted; the trainer's state first, so that the weights are the commit."""
        script, run = self._script, self._run
        self.version = version
        due = version % script.publish_every == 0 or version == self._steps
        if version in script.unpublished or not due:
            return
        for final, kind in ((run.trainer_state(version), "trainer"), (run.weight(version), "weights")):
            if final.exists():  # what a killed trainer left without its other half
                shutil.rmtree(final)
            files = self._files(version) if kind == "weights" else {"state.json": json.dumps({"version": version}).encode()}
            temporary = final if script.in_place else staging(final)
            temporary.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (temporary / name).write_bytes(content)
            if kind == "weights" and script.shard_seconds and stop.wait(script.shard_seconds):
                return
            if kind == "weights" and version in script.half_written:
                if not script.in_place:
                    temporary.rename(final)
                self._log.add("half_written", version=version)
                return
            extra = {"batch": version - 1} if kind == "trainer" else {"software": script.software} if script.software else {}
            write_manifest(temporary, kind=kind, lineage=self._lineage, id=version, extra=extra)  # type: ignore[arg-type]
            if not script.in_place:
                publish(temporary, final)
        self._log.add("published", version=version, lineage=self._lineage)

    def _files(self, version: int) -> dict[str, bytes]:
        own = self._foreign or {WEIGHTS_FILE: weights(version, size=self._size)}
        return {**self._side_files, **own}

    def _retire(self) -> None:
        if not self._script.keep:
            return
        for parent in (self._run.weights, self._run.trainer):
            for version in numbered(parent):
                directory = parent / f"{version:08d}"
                if version > self.version - self._script.keep:
                    continue
                with unheld(directory) as free:
                    if free and version not in self._script.undeletable:
                        shutil.rmtree(directory, ignore_errors=True)
                        self._log.add("retired", version=version)
                    else:
                        self._log.add("kept", version=version, why="held" if not free else "undeletable")

    # ------------------------------------------------------------------------------------------------------------------------ beginnings

    def _take_up(self) -> None:
        """Go on from the newest complete version, or make version 0 where the config asks for new weights."""
        lineage = self._lineage_now()
        if not lineage:
            time.sleep(POLL_SECONDS)
            return
        config = tomllib.loads(self._run.config.read_text("utf-8"))
        self._lineage, self._steps = lineage, int(config["run"]["steps"])
        model = Path(str(config["model"].get("path") or ""))
        self._side_files, self._foreign, self._size = _model_files(model) if config["model"].get("path") else (side_files(), {}, 16)
        complete = [version for version in numbered(self._run.weights) if read_manifest(self._run.weight(version)) is not None]
        for parent in (self._run.weights, self._run.trainer):
            for left in [*parent.glob(".tmp-*"), *(parent / f"{v:08d}" for v in numbered(parent) if v > max(complete, default=0))]:
                shutil.rmtree(left, ignore_errors=True)
        self.version = max(complete, default=0)
        self._log.add("started", version=self.version, lineage=lineage)
        if not complete and not config["model"].get("path"):
            self._publish(0, threading.Event())

    def _lineage_now(self) -> str:
        return str(self._info().get("lineage", ""))

    def _ended(self) -> bool:
        ended: dict[str, Any] | None = self._info().get("ended")
        return ended is not None and ended["time"] >= self._started

    def _info(self) -> dict[str, Any]:
        try:
            info: dict[str, Any] = json.loads(self._run.run_json.read_bytes())
        except FileNotFoundError:
            return {}
        return info

    def _deaths(self) -> int:
        """How often it has died at its batch, over all starts: told by a file, since the process is another each time."""
        path = self._run.path / ".fake-trainer-deaths"
        return len(path.read_bytes()) if path.exists() else 0

    def _die(self, k: int) -> None:
        with (self._run.path / ".fake-trainer-deaths").open("ab") as file:
            file.write(b"x")
        self._log.add("died", k=k)
        self._dies()


def _model_files(model: Path) -> tuple[dict[str, bytes], dict[str, bytes], int]:
    """Return the side files of a checkpoint, its weights where they are not a tiny model's, and the size of a tiny model's."""
    files = {path.name: path.read_bytes() for path in sorted(model.iterdir()) if path.is_file() and path.name != "manifest.json"}
    side = {name: content for name, content in files.items() if name.endswith(_SIDE_FILES) and not name.endswith(".index.json")}
    tensors = {name: content for name, content in files.items() if name.endswith(".safetensors")}
    size = size_of(tensors[WEIGHTS_FILE]) if set(tensors) == {WEIGHTS_FILE} else None
    return side, {} if size is not None else tensors, size or 16
