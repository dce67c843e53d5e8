"""LoRA adapters at one engine, beside base weights that never change: nothing is paused.

One is loaded under its version's name, the newest is told as the label, and older ones are unloaded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import msgspec

from headway.adapters.engines.calls import CallRefused, Calls
from headway.adapters.engines.generation import excerpt
from headway.adapters.engines.held import Tensors, is_adapter
from headway.adapters.engines.lora import KEPT_ADAPTERS, adapter_or_base, adapters_of, refuse_whole, served_models
from headway.adapters.engines.transfer import bytes_of
from headway.adapters.engines.weights import EngineWeights
from headway.errors import EngineFailed
from headway.types import Checkpoint, Transferred

_log = logging.getLogger("headway")
_UNLOAD_SECONDS = 10.0  # SGLang waits for the requests that use an adapter
_NONE = "default"


class AdapterWeights(EngineWeights):
    """The adapters of one lineage at one engine; `prefix` comes before the names of the routes."""

    def __init__(self, calls: Calls, prefix: str) -> None:
        super().__init__(calls)
        self._prefix = prefix
        self._lineage = ""
        self._base_label = ""  # the version that is the base model itself

    def read(self, directory: Path, model: Path | None) -> Tensors:
        """Return the tensors of an adapter that fits the model, or of the model itself (version 0). Raises `StorageError`."""
        return adapter_or_base(directory, model)

    def refuse(self, checkpoint: Checkpoint) -> None:
        """Raise `StorageError` for a later version that is no adapter, also where the base model is not known."""
        refuse_whole(checkpoint)

    def expect(self, checkpoint: Checkpoint) -> None:
        """Learn from a checkpoint whose adapters count."""
        self._lineage = checkpoint.label.rpartition("-")[0]

    async def label(self) -> str:
        """Return the name of the newest adapter of the lineage; where there is none, the base model's label, or "default"."""
        found = await self._loaded()
        return found[-1] if found else self._base_label or _NONE

    async def prepare(self, checkpoint: Checkpoint) -> None:
        """Nothing is to be paused."""

    async def load(self, checkpoint: Checkpoint) -> Transferred | None:
        """Load an adapter under its label. One that is there by that name is the same: a label is given to one set of weights only."""
        if not is_adapter(directory := Path(checkpoint.directory)):
            return None  # the base, which is there
        size = await asyncio.to_thread(bytes_of, directory)
        started = time.monotonic()
        try:
            await self._call("load_lora_adapter", {"lora_name": checkpoint.label, "lora_path": checkpoint.directory})
        except CallRefused:
            if checkpoint.label not in await self._loaded():
                raise
        done = Transferred("lora", size, time.monotonic() - started)
        _log.info("%s has loaded the adapter %s, %.2f MB, in %.3f s", self._calls.name, checkpoint.label, size / 1e6, done.seconds)
        return done

    async def activate(self, checkpoint: Checkpoint) -> None:
        """Who asks for the label gets the adapter; the base is itself a version."""
        if not is_adapter(Path(checkpoint.directory)):
            self._base_label = checkpoint.label

    def adapter_of(self, checkpoint: Checkpoint) -> str:
        """Return the adapter's name; "" for the base."""
        return checkpoint.label if is_adapter(Path(checkpoint.directory)) else ""

    async def verified(self, checkpoint: Checkpoint) -> None:
        """Unload all but the newest. What cannot be unloaded now is tried again after the next sync."""
        for name in (await self._loaded())[:-KEPT_ADAPTERS]:
            try:
                async with asyncio.timeout(_UNLOAD_SECONDS):
                    await self._call("unload_lora_adapter", {"lora_name": name})
            except (EngineFailed, TimeoutError) as error:
                _log.info("%s keeps the adapter %s for now: %s", self._calls.name, name, str(error) or "it is still in use")

    async def abandon(self) -> None:
        """Unload the newest adapter where it is not what was given."""
        if self._mistrusted:
            self._mistrusted = not await self._quietly(self._unload_newest, "could not be told that its weights are of no version")

    async def close(self) -> None:
        """Nothing is paused."""

    async def _unload_newest(self) -> None:
        """Unload the adapter that is told as the label, which then is no more. Raises `EngineFailed`."""
        for name in (await self._loaded())[-1:]:
            await self._call("unload_lora_adapter", {"lora_name": name})

    async def _loaded(self) -> list[str]:
        body = await self._calls.call("GET", "/v1/models")
        try:
            return adapters_of(self._lineage, served_models(body)) if self._lineage else []
        except msgspec.MsgspecError as error:
            raise EngineFailed(f"{self._calls.name}: {self._calls.url}/v1/models listed no models: {excerpt(body)}") from error

    async def _call(self, route: str, body: dict[str, str]) -> None:
        await self._calls.call("POST", f"{self._prefix}/{route}", body)
