"""What a checkpoint's safetensors files say they hold, by their headers alone: no tensor is read.

    file = length uint64 little-endian, JSON of that length: {name: {dtype, shape, data_offsets}}, data

A file that is shorter or longer than its header says is refused: it was cut, or is still being written. So is a tensor that has more or
fewer bytes than its shape and type take, and one that overlaps another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from headway.errors import StorageError
from headway.formats.bounded import open_regular

MAX_HEADER_BYTES = 100_000_000  # the format's own bound
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # engines convert these into each other when they load
_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
}  # of types with less than a byte an item, the size is not checked


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


def bytes_in(entries: Iterable[TensorEntry]) -> int:
    """Return how many bytes tensors have in all."""
    return sum(entry.span[1] - entry.span[0] for entry in entries)


def _read_file(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of one file, having checked that all its bytes are there."""
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise StorageError(f"{file} is truncated or no safetensors file ({size} bytes): write it again")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {name: _entry(file, entry, 8 + length) for name, entry in header.items()}
        end = max((entry.span[1] for entry in tensors.values()), default=8 + length)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"{file} has no readable header ({error}): write it again") from error
    if size != end:
        raise StorageError(f"{file} has {size} bytes where its header promises {end}: it was cut or is still being written")
    if wrong := _misplaced(tensors, 8 + length):
        raise StorageError(f"{file}: {wrong}: write it again")
    return tensors


def _misplaced(tensors: dict[str, TensorEntry], data: int) -> str:
    """Name a tensor whose bytes cannot be its own, for people; empty: all are where they should be. `data`: where they begin."""
    at = data
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].span):
        begin, end = entry.span
        item = _ITEM_BYTES.get(entry.dtype)
        if item is not None and end - begin != prod(entry.shape) * item:
            return f"{name} is {entry.dtype} {list(entry.shape)} and has {end - begin} bytes"
        if begin != at:
            return f"{name} begins at byte {begin}, and what lies before it ends at {at}"
        at = end
    return ""


def _entry(file: Path, said: Any, data: int) -> TensorEntry:
    """Return a tensor as a header has it; `data`: where the file's data begin. Raises ValueError for what none can be."""
    begin, end = said["data_offsets"]
    shape = tuple(said["shape"])
    if not all(type(number) is int and number >= 0 for number in (begin, end - begin, *shape)):
        raise ValueError(f"a tensor has shape {list(shape)} and lies at [{begin}, {end})")
    return TensorEntry(file, str(said["dtype"]), shape, (data + begin, data + end))
