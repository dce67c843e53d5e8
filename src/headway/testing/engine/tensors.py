"""What a directory of weights holds, tensor by tensor: type, shape and a hash of its bytes, so that a mixture of two checkpoints shows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headway.errors import StorageError
from headway.formats.tensor_headers import read_tensors
from headway.testing.model import version_in

DELTA_FILE = "delta.json"
PROBE_FILE = "probe.npz"


class Tensor(NamedTuple):
    """One tensor: safetensors type, shape, SHA-256 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


Tensors = dict[str, Tensor]


def tensors_of(directory: Path) -> Tensors:
    """Return the tensors of a directory's *.safetensors files. Raises ValueError for what is none, OSError."""
    try:
        entries = read_tensors(directory)
    except StorageError as error:
        raise ValueError(str(error)) from None
    found: Tensors = {}
    for file in sorted({entry.file for entry in entries.values()}):
        content = memoryview(file.read_bytes())
        length = int.from_bytes(content[:8], "little")
        header: dict[str, Any] = json.loads(bytes(content[8 : 8 + length]))
        for name, entry in header.items():
            if name in entries:
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                found[name] = Tensor(entries[name].dtype, entries[name].shape, hashlib.sha256(content[start:end]).hexdigest())
    return found


def delta_of(directory: Path) -> dict[str, Any] | None:
    """Return what delta.json says, None where there is none. Raises OSError, ValueError."""
    path = directory / DELTA_FILE
    return dict(json.loads(path.read_bytes())) if path.exists() else None


def number_of(directory: Path) -> int | None:
    """Return the version that the weights themselves say they are; None: they do not say."""
    try:
        return version_in(directory)
    except (OSError, ValueError):
        return None


def probe_of(directory: Path) -> tuple[list[int], list[float]] | None:
    """Return the ids and the log-probabilities of probe.npz, None where there is none. Raises OSError, ValueError, KeyError."""
    path = directory / PROBE_FILE
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as probe:
        return probe["token_ids"].tolist(), probe["logprobs"].tolist()


def mark_of(tensors: Tensors) -> str:
    """Return one text for the bytes of all tensors; the same bytes, the same text."""
    return hashlib.sha256(repr(sorted(tensors.items())).encode()).hexdigest() if tensors else "start"
