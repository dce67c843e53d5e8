"""A run as a reader finds it: `run.json`, the config that was in force, the journal's events and the rows of metrics.

The run may be over or going on. Nothing is locked and nothing written. What cannot be read is named in one line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.adapters.journal.reader import read_events
from headway.errors import ConfigError, HeadwayError, StorageError
from headway.events import AnyEvent
from headway.formats.bounded import read_regular
from headway.formats.files import storage_errors
from headway.formats.run_directory import RunDirectory, RunInfo, load_run_info
from headway.settings import RolloutSection

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A run directory that is one; `state` is where its journal lies, `steps` is run.steps."""

    directory: RunDirectory
    info: RunInfo
    rollout: RolloutSection
    name: str
    state: Path
    steps: int

    def events(self) -> Iterator[AnyEvent]:
        """Yield the journal's events, from the first; raises StorageError."""
        return read_events(self.state, run_id=self.info.id)

    def batches(self) -> Rows:
        """Return the row of each trained batch, the last that was written of each, in order; raises StorageError."""
        rows = _rows(self.directory.metrics_jsonl)
        with sane(self.directory.metrics_jsonl):
            by_batch = {int(row["batch"]): row for row in rows}
        return [by_batch[k] for k in sorted(by_batch)]

    def trained_batches(self) -> Rows:
        """Return the same rows; raises HeadwayError when there is none yet."""
        rows = self.batches()
        if not rows:
            raise HeadwayError(f"{self.directory.path}: no batch has been trained yet")
        if "token_staleness_histogram" not in rows[0]:
            raise StorageError(f"{self.directory.metrics_jsonl}: was written by an older headway, which kept no histograms")
        return rows

    def pipeline(self) -> Rows:
        """Return the rows of the pipeline, oldest first; raises StorageError."""
        return _rows(self.directory.pipeline_jsonl)


def open_run(path: Path) -> RunFiles:
    """Open a run directory for reading; raises ConfigError when it is none, StorageError when it is damaged."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory")
    directory = RunDirectory(path)
    if not directory.run_json.exists():
        raise ConfigError(f"{path}: not a run directory: it holds no {directory.run_json.name}")
    info = load_run_info(directory)
    with storage_errors(f"{directory.config}: cannot be read"):
        text = read_regular(directory.config)
    with sane(directory.config):
        config = tomllib.loads(text.decode())
        rollout = msgspec.convert(config["rollout"], RolloutSection)
        run = config["run"]
        name, steps = str(run["name"]), int(run["steps"])
        elsewhere = str(run["state_directory"]).replace("{name}", name)
    return RunFiles(directory, info, rollout, name, Path(elsewhere).expanduser() if elsewhere else directory.state, steps)


@contextmanager
def sane(path: Path) -> Iterator[None]:
    """Turn what damaged content raises into a StorageError that names the file."""
    try:
        yield
    except KeyError as error:
        raise StorageError(f"{path}: is damaged: {error.args[0]} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise StorageError(f"{path}: is damaged: {error}") from error


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file; a last line without its end is being written, and a missing file holds none."""
    with storage_errors(f"{path}: cannot be read"):
        data = read_regular(path) if path.exists() else b""
    decoder = msgspec.json.Decoder(dict[str, Any])
    rows = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            rows.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise StorageError(f"{path}: line {number} is damaged: {error}") from error
    return rows
