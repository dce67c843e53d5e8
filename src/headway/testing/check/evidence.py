"""What a run has left: its directory, its journal, its batches, and the logs of the fakes around it; read once, judged by the invariants.

What cannot be read is itself something to report (`unreadable`): a damaged file never makes a check pass.
"""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.numpy import load_file

from headway.adapters.journal.reader import read_events
from headway.errors import HeadwayError
from headway.events import AnyEvent, Finished, Resumed
from headway.formats.batch import RECORDS, TENSORS
from headway.formats.manifest import read_manifest, verify
from headway.formats.run_directory import RunDirectory, numbered
from headway.testing.log import Entry


@dataclass(frozen=True)
class Violation:
    """An invariant that does not hold, by its number in the list of ten, and what shows it."""

    invariant: int
    what: str

    def __str__(self) -> str:
        return f"invariant {self.invariant}: {self.what}"


@dataclass(frozen=True)
class FoundBatch:
    """A batch as it lies on disk. `rows` of the Parquet file; `facts`: its manifest's own keys, those of the batch among them."""

    k: int
    lineage: str
    facts: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]
    rows: list[dict[str, Any]]


@dataclass
class Evidence:
    """Everything the invariants look at. A log that is None was not given; `exit_code` None: nobody said how the process ended."""

    directory: Path
    engine_logs: Sequence[Sequence[Entry]] | None = None
    trainer_log: Sequence[Entry] | None = None
    environment_log: Sequence[Entry] | None = None
    exit_code: int | None = None
    unreadable: list[Violation] = field(default_factory=list)

    @cached_property
    def run(self) -> RunDirectory:
        """Names of files in the run directory."""
        return RunDirectory(self.directory)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config; empty when there is none."""
        found: dict[str, Any] = {}
        with self._reading(8, self.run.config):
            found |= tomllib.loads(self.run.config.read_text("utf-8"))
        return found

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a key of the config, by its dotted name."""
        found: Any = self.config
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return default if found is None else found

    @cached_property
    def info(self) -> dict[str, Any]:
        """run.json; empty when there is none."""
        found: Any = {}
        with self._reading(8, self.run.run_json):
            found = json.loads(self.run.run_json.read_bytes())
        return found if isinstance(found, dict) else {}

    @property
    def ended(self) -> dict[str, Any] | None:
        """How the run says that it ended: code, cause, time."""
        ended = self.info.get("ended")
        return ended if isinstance(ended, dict) else None

    @property
    def was_killed(self) -> bool:
        """Whether the newest process could not end in order: by a signal that kills, or, where nobody said, because no end is recorded."""
        return self.ended is None if self.exit_code is None else self.exit_code < 0

    @cached_property
    def events(self) -> list[AnyEvent]:
        """The journal, as far as it can be read."""
        name = self.setting("run.state_directory") or ""
        state = Path(str(name).replace("{name}", str(self.setting("run.name", "")))).expanduser() if name else self.run.state
        found: list[AnyEvent] = []
        if not self.info:
            return found
        try:
            found.extend(read_events(state, run_id=str(self.info.get("id"))))
        except HeadwayError as error:
            if not (self.was_killed or self._failed_early) or state.exists():
                self.unreadable.append(Violation(1, f"the journal cannot be read: {error}"))
        return found

    @property
    def _failed_early(self) -> bool:
        code = self.exit_code if self.ended is None else self.ended.get("code")
        return code not in {0, None} and not numbered(self.run.batches)

    @cached_property
    def batches(self) -> dict[int, FoundBatch]:
        """Every whole batch on disk, by k. One that is named and not whole is reported."""
        found: dict[int, FoundBatch] = {}
        for k in numbered(self.run.batches):
            directory = self.run.batch(k)
            try:
                manifest = read_manifest(directory)
                if manifest is None:
                    self.unreadable.append(Violation(9, f"{directory} lies under its final name without a valid manifest"))
                    continue
                verify(directory, manifest)
                arrays = load_file(directory / TENSORS)
                rows = pq.read_table(directory / RECORDS).to_pylist()
            except (HeadwayError, OSError, SafetensorError, pa.ArrowException) as error:
                self.unreadable.append(Violation(9, f"{directory} is taken for complete and cannot be read: {error}"))
                continue
            found[k] = FoundBatch(k, manifest.lineage, manifest.extra, arrays, rows)
        return found

    def jsonl(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a JSONL file that can be read; which cannot is invariant 10's to say."""
        path = self.directory / name
        rows = []
        for line in path.read_bytes().split(b"\n") if path.exists() else []:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    rows.append(row)
        return rows

    @cached_property
    def generations(self) -> dict[tuple[str, int, int, int], list[Entry]]:
        """What the engines have answered, by (purpose, group, member, attempt): `arrived` and `finished` of a request in one entry."""
        found: dict[tuple[str, int, int, int], list[Entry]] = {}
        for log in self.engine_logs or ():
            arrived: dict[tuple[int, int], Entry] = {}
            for entry in log:
                key = entry["pid"], entry.get("id", -1)
                if entry["what"] == "arrived":
                    arrived[key] = entry
                elif entry["what"] == "finished" and (start := arrived.pop(key, None)) is not None and start["group"] is not None:
                    name = start["purpose"], start["group"], start["member"], start["attempt"]
                    found.setdefault(name, []).append({**start, **entry, "arrived": start["time"]})
        return found

    def answers(self, group: int, member: int, attempt: int) -> list[Entry]:
        """Return what the engines have answered to an attempt of a training rollout, in the process that saw it finish.

        An earlier one may have attempted the same and been killed before that was durable; its group, if that was not durable either, may
        even have been another's: the number is given again.
        """
        since = self._attempted_since.get((group, member), 0.0)
        return [entry for entry in self.generations.get(("train", group, member, attempt), []) if entry["arrived"] >= since]

    @cached_property
    def _attempted_since(self) -> dict[tuple[int, int], float]:
        """When the process that saw a rollout finish took the run up, by (group, member); no entry: it started the run."""
        since: dict[tuple[int, int], float] = {}
        taken_up = 0.0
        for event in self.events:
            if isinstance(event, Resumed):
                taken_up = event.time
            elif isinstance(event, Finished):
                since[event.group, event.member] = taken_up
        return since

    @contextlib.contextmanager
    def _reading(self, invariant: int, path: Path) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            if self.exit_code in {0, 3, 130, 143}:
                self.unreadable.append(Violation(invariant, f"{path} is missing"))
        except (OSError, ValueError) as error:
            self.unreadable.append(Violation(invariant, f"{path} cannot be read: {error}"))


def versions_of(sample: dict[str, Any]) -> npt.NDArray[np.int64]:
    """Return the version of every sampled token of a sample of the Parquet file, by its stamps. Raises ValueError when they do not fit."""
    if len({len(sample[name]) for name in ("token_ids", "sampled_mask", "loss_mask", "logprobs")}) != 1:
        raise ValueError("its lists have unequal lengths")
    sampled = int(np.count_nonzero(sample["sampled_mask"]))
    bounds = [*sample["span_start"], sampled]
    if sampled and (not sample["span_start"] or bounds[0] != 0 or any(b <= a for a, b in pairwise(bounds))):
        raise ValueError(f"stamps begin at {sample['span_start']} and {sampled} tokens are sampled")
    return np.repeat(np.array(sample["span_version"], np.int64), np.diff(bounds)) if sampled else np.zeros(0, np.int64)
