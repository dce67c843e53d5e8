"""Checkpoint directories: validated by their safetensors headers before a byte of the running model is touched.

A server that loads first and checks later is left with mixed or missing weights by a truncated file, a lacking tensor or a wrong shape.
Here `WeightLoader.check` refuses all of them, and `WeightLoader.load` copies in place only what has passed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from headway.errors import HeadwayError

MAX_HEADER_BYTES = 100_000_000  # the format's own bound
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # converted freely into each other; anything else must match


class CheckpointRefused(HeadwayError):
    """A checkpoint that does not fit the running model, or is damaged; nothing was changed."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor of a checkpoint lies, its shape and its safetensors type."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_headers(directory: Path) -> dict[str, TensorEntry]:
    """Return every tensor of a checkpoint directory by name; CheckpointRefused names the file that is missing or damaged."""
    files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    if not files:
        what = "holds no *.safetensors file" if directory.is_dir() else "is no directory"
        raise CheckpointRefused(f"{directory} {what}: point weights_path at a Hugging Face checkpoint that this machine can read")
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in _header(file).items():
            if name in tensors:
                raise CheckpointRefused(
                    f"{file} holds {name}, which {tensors[name].file.name} holds too: remove the file that is left over"
                )
            tensors[name] = TensorEntry(file, tuple(entry["shape"]), entry["dtype"])
    return tensors


def _header(file: Path) -> dict[str, Any]:
    """Return the header of one file, having checked that all its bytes are there."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointRefused(f"{file} is truncated or no safetensors file ({size} bytes): write it again")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointRefused(f"{file} cannot be read ({error}): write it again") from error
    if size != end:
        raise CheckpointRefused(f"{file} has {size} bytes where its header promises {end}: it was cut or is still being written")
    return header


class WeightLoader:
    """Swaps the weights of one running model.

    `expected` are the tensors of the checkpoint that the model was loaded from. Where a checkpoint's names are the module's own, tensors
    are copied one by one; where transformers converts on loading (fused experts), a second model is loaded and copied over.
    """

    def __init__(self, model: Any, expected: Mapping[str, TensorEntry]) -> None:
        self._model = model
        self._optional = set(model.all_tied_weights_keys)
        self._expected = dict(expected)
        self._targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())

    def check(self, directory: Path) -> dict[str, TensorEntry]:
        """Return the tensors to load if the checkpoint fits the running model; CheckpointRefused says why it does not."""
        found = read_headers(directory)
        required = self._expected.keys() - self._optional
        if missing := sorted(required - found.keys()):
            raise CheckpointRefused(f"{directory} lacks {_named(missing)}, which the running model has: is it another architecture?")
        if unknown := sorted(found.keys() - self._expected.keys() - self._optional):
            raise CheckpointRefused(f"{directory} holds {_named(unknown)}, which the running model lacks: is it another architecture?")
        wanted = {name: entry for name, entry in found.items() if name in self._expected}
        for name, entry in wanted.items():
            expected = self._expected[name]
            if entry.shape != expected.shape:
                raise CheckpointRefused(f"{directory}: {name} has shape {list(entry.shape)}, the running model has {list(expected.shape)}")
            if entry.dtype != expected.dtype and not {entry.dtype, expected.dtype} <= FLOATS:
                raise CheckpointRefused(f"{directory}: {name} is of type {entry.dtype}, the running model was loaded from {expected.dtype}")
        return wanted

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Check the checkpoint, then copy it into the running model, converting to its dtype and device."""
        wanted = self.check(directory)
        for name, tensor in self._read(directory, wanted).items():  # all is read before anything is written
            self._targets[name].copy_(tensor)

    def _read(self, directory: Path, wanted: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
        if wanted.keys() <= self._targets.keys():
            return _tensors(wanted)
        twin = type(self._model).from_pretrained(directory, dtype=self._model.dtype, local_files_only=True)
        return dict(twin.named_parameters())


def _tensors(entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = {}
    for file in sorted({entry.file for entry in entries.values()}):
        with safe_open(file, framework="pt") as stream:
            loaded.update({name: stream.get_tensor(name) for name in entries if entries[name].file == file})
    return loaded


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"
