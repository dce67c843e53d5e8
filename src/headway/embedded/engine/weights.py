"""Checkpoint directories: validated by their safetensors headers before a byte of the running model is touched.

A server that loads first and checks later is left with mixed or missing weights by a truncated file, a lacking tensor or a wrong shape.
Here `WeightLoader.check` refuses all of them, and `WeightLoader.load` copies in place only what has passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from headway.embedded.threads import LOADING
from headway.errors import StorageError
from headway.formats.tensor_headers import TensorEntry, read_tensors

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # converted freely into each other; anything else must match


class CheckpointRefused(StorageError):
    """A checkpoint that does not fit the running model; nothing was changed."""


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
        """Return the tensors to load if the checkpoint is whole (otherwise StorageError) and fits the running model (CheckpointRefused)."""
        found = read_tensors(directory)
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
        with LOADING:
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
