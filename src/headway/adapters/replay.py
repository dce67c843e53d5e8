"""Replays rollouts of earlier runs, or of another program: `rollouts.parquet` of batches, and `.jsonl` files with a group per line.

Files are read in order, one at a time, off the loop; groups come as they lie in them. Of a batch's record only groups whose rollouts all
have a finite reward are replayed; how many others were left out is logged for each file. A file that is damaged (by the manifest beside it,
where there is one), or holds what this run's model cannot take, is an error that names it.
"""

from __future__ import annotations

import asyncio
import glob
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from headway.errors import ConfigError, StorageError
from headway.formats.bounded import open_regular, refuse_irregular
from headway.formats.files import storage_errors
from headway.formats.manifest import read_manifest, verify
from headway.formats.offered import (
    InvalidGroup,
    OfferedGroup,
    SampleLimits,
    checked_sample,
    decode_group,
    offered_group,
    offered_rollout,
    plain_metadata,
)
from headway.formats.rollout import SCHEMA_VERSION
from headway.types import Finish, Sample

MAX_LINE_BYTES = 256 * 1024**2
MAX_VALUES = 2**31 - 1  # of a column of a Parquet file: a batch has no more
SUFFIXES = (".parquet", ".jsonl")
_log = logging.getLogger("headway")


class _Row(msgspec.Struct, frozen=True):
    """The header columns of a rollout that are kept."""

    prompt_id: str
    group_id: int
    member: int
    environment: str
    reward: float | None
    rewards: list[tuple[str, float]]
    finish: Finish
    turns: Annotated[int, Meta(ge=0)]
    started: float
    finished: float
    engine: str
    metadata: str


_HEADER = list(_Row.__struct_fields__)
_COLUMNS: dict[str, tuple[Any, Any]] = {  # of a sample: its dtype, and what may be turned into it
    "token_ids": (np.int32, "safe"),
    "sampled_mask": (np.bool_, "no"),
    "loss_mask": (np.bool_, "no"),
    "logprobs": (np.float32, "same_kind"),
}


def find_files(pattern: str, base: Path) -> list[Path]:
    """Return the files that an entry of replay.files names, in order; paths are relative to `base`. Raises ConfigError."""
    shown = f'replay.files: "{pattern}"'
    if (base / pattern).expanduser().is_file():
        found = [(base / pattern).expanduser()]
    else:
        matches = glob.glob(str(Path(pattern).expanduser()), root_dir=base, recursive=True)  # noqa: PTH207 -- absolute patterns too
        found = sorted(path for match in matches if (path := base / match).is_file())
    if not found:
        raise ConfigError(f"{shown} matches no file (a relative path starts at the config file)")
    for path in found:
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"{shown}: {path} is neither rollouts.parquet of a batch nor a .jsonl file with a group per line")
    return found


class ReplayFiles:
    """The groups of these files, `epochs` times over (0: without end). Raises StorageError where it cannot go on.

    `given`: how many groups of a name the run has had already, before it was taken up again: so many are left out.
    """

    def __init__(self, files: Sequence[Path], *, epochs: int, limits: SampleLimits, given: Mapping[str, int] | None = None) -> None:
        self._files = files
        self._epochs = epochs
        self._limits = limits
        self._given = Counter(given)

    def __aiter__(self) -> AsyncIterator[OfferedGroup]:
        return self._groups()

    async def _groups(self) -> AsyncIterator[OfferedGroup]:
        epoch = 0
        while not self._epochs or epoch < self._epochs:
            empty = True
            for path in self._files:
                groups = read_groups(path, self._limits)
                while (group := await asyncio.to_thread(next, groups, None)) is not None:
                    empty = False
                    if self._given[group.name] > 0:
                        self._given[group.name] -= 1
                        continue
                    yield group
            if empty:
                raise StorageError("replay.files: none of the files holds a group that could be replayed: name others")
            epoch += 1


def read_groups(path: Path, limits: SampleLimits) -> Iterator[OfferedGroup]:
    """Yield the groups of one file. Raises StorageError that names it."""
    with storage_errors(f"{path}: cannot be read"):
        yield from _read_lines(path, limits) if path.suffix == ".jsonl" else _read_record(path, limits)


def _read_lines(path: Path, limits: SampleLimits) -> Iterator[OfferedGroup]:
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
            if len(line) > MAX_LINE_BYTES:
                raise StorageError(f"{path}:{number}: a group has more than {MAX_LINE_BYTES} bytes: more than can be replayed")
            if not line.strip():
                continue
            try:
                yield decode_group(line, source="replay", limits=limits, now=time.time())
            except InvalidGroup as error:
                raise StorageError(f"{path}:{number}: no group that could be replayed: {error}") from error


def _read_record(path: Path, limits: SampleLimits) -> Iterator[OfferedGroup]:
    manifest = read_manifest(path.parent)
    if manifest is not None and path.name in manifest.files:
        verify(path.parent, msgspec.structs.replace(manifest, files={path.name: manifest.files[path.name]}))
    with _named(path, "cannot be read as the record of a batch"):
        rows, samples = _open_record(path)
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row.group_id, []).append(place)
    left_out = 0
    for group, places in groups.items():
        if not all(_is_finite(rows[place].reward) for place in places):
            left_out += 1
            continue
        with _named(path, f"group {group} cannot be replayed"):
            offered = _group([(rows[place], samples[place]) for place in places], limits)
        yield offered
    if left_out:
        _log.warning("%s: %d of %d groups are not replayed: a rollout of theirs has no finite reward", path, left_out, len(groups))


@contextmanager
def _named(path: Path, what: str) -> Iterator[None]:
    """Turn whatever is raised inside into a StorageError that names the file: a damaged table may raise anything."""
    try:
        yield
    except (StorageError, OSError):
        raise
    except Exception as error:
        raise StorageError(f"{path}: {what}: {error}") from error


def _open_record(path: Path) -> tuple[list[_Row], Any]:
    """Return the rows' headers, and their samples as an Arrow column."""
    import pyarrow.parquet as pq

    refuse_irregular(path)
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        version = int((schema.metadata or {}).get(b"headway.rollout_schema", b"0"))
        if version != SCHEMA_VERSION:
            known = f"written by a newer headway (schema version {version})" if version else "no record of a batch of headway's"
            raise StorageError(f"{path}: {known}: rollouts.parquet of schema version {SCHEMA_VERSION} can be replayed")
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        if max((group.column(i).num_values for group in groups for i in range(group.num_columns)), default=0) > MAX_VALUES:
            raise StorageError(f"{path}: claims more than {MAX_VALUES} values in a column: more than any batch has")
        if missing := [name for name in (*_HEADER, "samples") if name not in schema.names]:
            raise StorageError(f"{path}: is damaged: it has no column {missing[0]}")
        table = file.read(columns=[*_HEADER, "samples"])
    return msgspec.convert(table.select(_HEADER).to_pylist(), list[_Row]), table.column("samples")


def _group(members: list[tuple[_Row, Any]], limits: SampleLimits) -> OfferedGroup:
    rollouts = []
    for member, (row, cell) in enumerate(sorted(members, key=lambda pair: pair[0].member)):
        where = f"rollouts[{member}]"
        header: dict[str, Any] = {
            "member": member,
            "prompt_id": row.prompt_id,
            "environment": row.environment,
            "reward": row.reward,
            "rewards": dict(row.rewards),
            "finish": row.finish,
            "turns": row.turns,
            "metadata": plain_metadata(where, msgspec.json.decode(row.metadata, type=dict[str, Any])),
            "started": row.started,
            "finished": row.finished,
            "engine": row.engine,
        }
        rollouts.append(offered_rollout(where, _samples(where, cell, limits), source="replay", **header))
    return offered_group(rollouts[0].prompt_id, "replay", rollouts)


def _samples(where: str, cell: Any, limits: SampleLimits) -> list[Sample]:
    """Return the samples in one cell of the column, a list of structs."""
    structs = cell.values
    columns = {name: structs.field(name) for name in _COLUMNS}
    policies = structs.field("policy_id").to_pylist()
    samples = []
    for i, policy in enumerate(policies):
        arrays = {
            name: columns[name][i].values.to_numpy(zero_copy_only=False).astype(dtype, casting=casting)
            for name, (dtype, casting) in _COLUMNS.items()
        }
        samples.append(checked_sample(f"{where}.samples[{i}]", policy_id=policy, limits=limits, **arrays))
    return samples


def _is_finite(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)
