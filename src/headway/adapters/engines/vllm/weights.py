"""The weights of one engine that speaks vLLM's protocol: the routes that pause it, load them, label them and clear caches.

A reload neither pauses nor labels nor clears a cache by itself, and a failed one may leave weights of two versions behind.
"""

from __future__ import annotations

import msgspec

from headway.adapters.engines.generation import excerpt
from headway.adapters.engines.vllm.wire import LABEL_PATH, read_label
from headway.adapters.engines.weights import NOBODYS_LABEL, WholeWeights, says_no
from headway.errors import EngineFailed
from headway.types import Checkpoint

_PAUSE_MODES = {"in_flight": "keep", "wait": "wait", "abort_resume": "abort"}


class VllmWeights(WholeWeights):
    """Whole weights at one vLLM-speaking server."""

    async def label(self) -> str:
        """Ask for the label of the weights."""
        body = await self._calls.call("GET", LABEL_PATH)
        try:
            return read_label(body)
        except msgspec.DecodeError as error:
            raise EngineFailed(f"{self._calls.name}: {self._calls.url}{LABEL_PATH} named no weight_version: {excerpt(body)}") from error

    @property
    def _keeps_cache(self) -> bool:
        return self._settings.weight_sync == "in_flight" and not self._settings.recompute_kv

    async def _pause(self) -> None:
        clears = "false" if self._keeps_cache else "true"
        await self._calls.call("POST", f"/pause?mode={_PAUSE_MODES[self._settings.weight_sync]}&clear_cache={clears}")

    async def _load(self, checkpoint: Checkpoint) -> None:
        request = {"method": "reload_weights", "kwargs": {"weights_path": checkpoint.directory}}
        await self._calls.call("POST", "/collective_rpc", request)

    async def _relabel(self, label: str) -> None:
        await self._calls.call("POST", "/update_weight_version", {"new_version": label})

    async def _clear(self) -> None:
        if self._keeps_cache:
            await self._reset_cache()

    async def _reset_cache(self) -> None:
        """Drop cached prefixes. Requests that run may hold some of them: then their contexts are computed anew, for none may be stale."""
        answer = await self._calls.call("POST", "/reset_prefix_cache")
        if says_no(answer):
            answer = await self._calls.call("POST", "/reset_prefix_cache?reset_running_requests=true")
        if says_no(answer):
            raise EngineFailed(f"{self._calls.name}: {self._calls.url} did not reset its prefix cache: {excerpt(answer)}")

    async def _resume(self) -> None:
        await self._calls.call("POST", "/resume")

    async def _disown(self) -> None:
        await self._relabel(NOBODYS_LABEL)
        await self._halt()

    async def _halt(self) -> None:
        await self._calls.call("POST", "/pause?mode=abort&clear_cache=true")
