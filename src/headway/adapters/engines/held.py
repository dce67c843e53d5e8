"""The checkpoints that an engine serves and is offered: checked by their files' headers before the engine hears of them, and held.

What does not fit never reaches a server: vLLM takes a checkpoint that lacks a tensor and mixes old weights with new ones in silence, and a
wrong shape is beyond repair. A checkpoint is compared with the one that is served; the first with the model that the run started from.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from headway.errors import StorageError
from headway.formats.bounded import read_bounded
from headway.formats.hold import Hold
from headway.formats.manifest import NAME as MANIFEST
from headway.formats.tensor_headers import FLOATS, read_tensors

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name to (dtype, shape), as safetensors headers have it."""

ADAPTER_CONFIG = "adapter_config.json"
_MOST_CONFIG_BYTES = 16 * 1024**2
_TIED = "lm_head.weight"  # beside an embedding that it shares, some write it and some do not


class _Held(NamedTuple):
    directory: Path
    tensors: Tensors
    hold: Hold


class HeldCheckpoints:
    """What one engine serves, and what it is offered. `model`: the checkpoint that the run started from; "": none that is known."""

    def __init__(self, name: str, model: str, read: Callable[[Path, Path | None], Tensors]) -> None:
        self._name = name
        self._model = Path(model) if model else None
        self._read = read
        self._served: _Held | None = None  # its directory stays while it is served
        self._offered: _Held | None = None

    @property
    def offered(self) -> bool:
        """Whether a checkpoint was checked that is not served yet."""
        return self._offered is not None

    async def offer(self, directory: Path) -> None:
        """Check the checkpoint's files, and hold them until the next ones are served. Raises StorageError."""
        self.withdraw()
        hold = Hold(directory)
        try:
            tensors = await asyncio.to_thread(self._checked, directory)
        except BaseException:
            hold.release()
            raise
        self._offered = _Held(directory, tensors, hold)

    def serve(self) -> None:
        """What was offered is served."""
        offered, self._offered = self._offered, None
        if offered is not None:
            served, self._served = self._served, offered
            if served is not None:
                served.hold.release()

    def withdraw(self) -> None:
        """What was offered is not served."""
        if self._offered is not None:
            self._offered.hold.release()
            self._offered = None

    def close(self) -> None:
        """Let all directories go, and forget what lies in them; idempotent."""
        self.withdraw()
        served, self._served = self._served, None
        if served is not None:
            served.hold.release()

    def _checked(self, directory: Path) -> Tensors:
        tensors = self._read(directory, self._model)
        if self._served is not None:
            served, reference = self._served.tensors, self._served.directory
        elif self._model is not None and self._model != directory and (known := known_tensors(self._model)):
            served, reference = known, self._model
        else:
            return tensors
        if is_adapter(reference) != is_adapter(directory):
            return tensors  # an adapter beside the model that it belongs to: whoever read it has compared them
        converted = reference == self._model or not (reference / MANIFEST).exists()
        if difference := differs(served, tensors, converted=converted, tied=is_tied(directory)):
            raise StorageError(f"{directory} does not fit the model that {self._name} serves: {difference}")
        return tensors


def full_checkpoint(directory: Path) -> Tensors:
    """Return the tensors of a directory that holds all weights of a model. Raises StorageError."""
    if is_adapter(directory):
        raise StorageError(f'{directory} holds a LoRA adapter, no whole model: set engine.weight_transfer = "lora"')
    return {name: (entry.dtype, entry.shape) for name, entry in read_tensors(directory).items()}


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds a LoRA adapter as PEFT writes it."""
    return (directory / ADAPTER_CONFIG).exists()


def known_tensors(model: Path) -> Tensors | None:
    """Return the tensors of the model that the run started from; None where they cannot be read from here any more."""
    try:
        return {name: (entry.dtype, entry.shape) for name, entry in read_tensors(model).items()}
    except StorageError:
        return None


def is_tied(directory: Path) -> bool:
    """Whether the config of a checkpoint says that its output head is its embedding."""
    try:
        return json.loads(read_bounded(directory / "config.json", _MOST_CONFIG_BYTES)).get("tie_word_embeddings") is True
    except (OSError, StorageError, ValueError, AttributeError, RecursionError):
        return False


def differs(served: Tensors, offered: Tensors, *, converted: bool, tied: bool) -> str:
    """Name one tensor by which `offered` does not fit, for people; empty: it fits.

    `converted`: floating-point types may differ (a user's model, weights of another run included, and what a trainer makes of it: engines
    convert when they load).
    `tied`: the output head may be absent from either.
    """
    for name in sorted(served.keys() | offered.keys()):
        before, now = served.get(name), offered.get(name)
        if before == now or (tied and name == _TIED and None in {before, now}):
            continue
        if converted and before and now and before[1] == now[1] and {before[0], now[0]} <= FLOATS:
            continue
        return f"tensor {name} is {now or 'missing'}, served is {before or 'none'}"
    return ""
