"""What a checkpoint's safetensors files say they hold, by their headers alone: no tensor is read.

    file = length uint64 little-endian, JSON of that length: {name: {dtype, shape, data_offsets}}, data

A file that is shorter or longer than its header says is refused: it was cut, or is still being written.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.errors import StorageError

MAX_HEADER_BYTES = 100_000_000  # the format's own bound


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor of a checkpoint lies, its safetensors type and its shape. `span`: its bytes [begin, end) in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    span: tuple[int, int] = field(default=(0, 0), compare=False)


def read_tensors(directory: Path) -> dict[str, TensorEntry]:
    """Return every tensor of a checkpoint directory by name. Raises StorageError, naming the file that is missing or damaged."""
    files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    if not files:
        what = "holds no *.safetensors file" if directory.is_dir() else "is no directory"
        raise StorageError(f"{directory} {what}: it must be a Hugging Face checkpoint that this machine can read")
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in _read_file(file).items():
            if name in tensors:
                raise StorageError(f"{file} holds {name}, which {tensors[name].file.name} holds too: remove the file that is left over")
            tensors[name] = entry
    return tensors


def _read_file(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of one file, having checked that all its bytes are there."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise StorageError(f"{file} is truncated or no safetensors file ({size} bytes): write it again")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {name: _entry(file, entry, 8 + length) for name, entry in header.items()}
        end = max((entry.span[1] for entry in tensors.values()), default=8 + length)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StorageError(f"{file} has no readable header ({error}): write it again") from error
    if size != end:
        raise StorageError(f"{file} has {size} bytes where its header promises {end}: it was cut or is still being written")
    return tensors


def _entry(file: Path, said: Any, data: int) -> TensorEntry:
    """Return a tensor as a header has it; `data`: where the file's data begin. Raises ValueError where it lies nowhere."""
    begin, end = said["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError(f"a tensor lies at [{begin}, {end})")
    return TensorEntry(file, str(said["dtype"]), tuple(said["shape"]), (data + begin, data + end))
