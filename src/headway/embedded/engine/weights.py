"""Checkpoint directories: validated by their safetensors headers before a byte of the running model is touched.

A server that loads first and checks later is left with mixed or missing weights by a truncated file, a lacking tensor or a wrong shape.
Here `WeightLoader.check` refuses all of them, and `WeightLoader.load` copies in place only what has passed.

A delta directory (`formats.delta`) is the one that may lack tensors: its own are held against the hashes that it states, and those that it
leaves out against the hashes of what was loaded. A checkpoint that lacks tensors otherwise is refused, as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from headway.embedded.threads import LOADING
from headway.errors import StorageError
from headway.formats.bounded import refuse_irregular_in
from headway.formats.delta import Delta, Hashes, read_delta, refuse_other_base, tensor_hashes, verified_tensors
from headway.formats.tensor_headers import FLOATS, TensorEntry, read_tensors


class CheckpointRefused(StorageError):
    """A checkpoint that does not fit the running model; nothing was changed."""


class LoadedFiles:
    """The files that weights were loaded from: hashed when a delta asks, and only while they are as they were."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._files = {entry.file: _signature(entry.file) for entry in entries.values()}

    def hashes(self) -> Hashes:
        """Return the hashes of the tensors. Raises StorageError where the files are not those that were loaded any more."""
        directories = {file.parent for file in self._files}
        hashes = {name: value for directory in directories for name, value in tensor_hashes(directory).items()}
        for file, signature in self._files.items():
            if _signature(file) != signature:
                raise CheckpointRefused(f"{file} has changed since it was loaded: a complete checkpoint must come first")
        return hashes


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
        self._loaded: LoadedFiles | Hashes | None = LoadedFiles(expected)  # None: not one version

    def check(self, directory: Path) -> dict[str, TensorEntry]:
        """Return the tensors to load if the checkpoint is whole (otherwise StorageError) and fits the running model (CheckpointRefused)."""
        found = read_tensors(directory)
        self._refuse_lacking(directory, found.keys())
        return self._fitting(directory, found)

    def check_delta(self, directory: Path, delta: Delta) -> dict[str, TensorEntry]:
        """Return the tensors to load if they and those that were loaded are the delta's version, by hash. Raises StorageError."""
        self._refuse_lacking(directory, delta.tensors.keys())
        if not self._expected.keys() <= self._targets.keys():
            raise CheckpointRefused(f"{directory}: this architecture is converted when it is loaded: it takes complete checkpoints only")
        if self._loaded is None:
            raise CheckpointRefused(f"{directory}: a load before has failed: a complete checkpoint must come first")
        found = verified_tensors(directory, delta)
        if isinstance(self._loaded, LoadedFiles):
            self._loaded = self._loaded.hashes()
        refuse_other_base(delta, self._loaded, found)
        return self._fitting(directory, found)

    def _refuse_lacking(self, directory: Path, names: AbstractSet[str]) -> None:
        if missing := sorted(self._expected.keys() - self._optional - names):
            raise CheckpointRefused(f"{directory} lacks {_named(missing)}, which the running model has: is it another architecture?")

    def _fitting(self, directory: Path, found: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Return the tensors that the model takes; CheckpointRefused for one of another name, shape or kind."""
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
        """Check the checkpoint, or the delta, then copy it into the running model, converting to its dtype and device."""
        delta = read_delta(directory)
        wanted = self.check(directory) if delta is None else self.check_delta(directory, delta)
        loaded = LoadedFiles(wanted) if delta is None else delta.tensors
        tensors = self._read(directory, wanted)  # all is read before anything is written
        self._loaded = None
        for name, tensor in tensors.items():
            self._targets[name].copy_(tensor)
        self._loaded = loaded

    def _read(self, directory: Path, wanted: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
        if wanted.keys() <= self._targets.keys():
            return _tensors(wanted)
        refuse_irregular_in(directory)
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


def _signature(file: Path) -> tuple[int, ...]:
    """Return what tells that a file is still the one that it was; () where it is gone."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
