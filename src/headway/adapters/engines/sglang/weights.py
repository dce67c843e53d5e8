"""The weights of one SGLang server: the routes that pause it, load and label them, and clear caches.

One call loads and labels. A sync keeps what is in flight (`retract`: contexts are computed anew under the new weights; `in_place`: they
stay), aborts it (`abort`), or does not pause at all: an update of an unpaused server waits for what is in flight, and lets nothing start.
"""

from __future__ import annotations

import msgspec

from headway.adapters.engines.calls import CallRefused
from headway.adapters.engines.generation import excerpt
from headway.adapters.engines.vllm.wire import read_label
from headway.adapters.engines.weights import NOBODYS_LABEL, WholeWeights, says_no
from headway.errors import EngineFailed
from headway.formats.bounded import decode_json
from headway.types import Checkpoint


class _Done(msgspec.Struct, frozen=True):
    success: bool = True
    message: str = ""


class SglangWeights(WholeWeights):
    """Whole weights at one SGLang server."""

    async def label(self) -> str:
        """Ask for the label of the weights."""
        body = await self._calls.first("/model_info", "/get_model_info")
        try:
            return read_label(body)
        except msgspec.DecodeError as error:
            raise EngineFailed(f"{self._calls.name}: {self._calls.url}/model_info named no weight_version: {excerpt(body)}") from error

    @property
    def _mode(self) -> str:
        """How it is paused; empty: it is not."""
        modes = {"in_flight": "retract" if self._settings.recompute_kv else "in_place", "abort_resume": "abort", "wait": ""}
        return modes[self._settings.weight_sync]

    async def _pause(self) -> None:
        if self._mode:
            await self._calls.call("POST", "/pause_generation", {"mode": self._mode})
        else:
            await self._resume()  # paused by somebody else, it would wait for ever for what is in flight

    async def _load(self, checkpoint: Checkpoint) -> None:
        request = {
            "model_path": checkpoint.directory,
            "weight_version": checkpoint.label,
            "flush_cache": self._mode != "in_place",
            "abort_all_requests": False,
        }
        body = await self._calls.call("POST", "/update_weights_from_disk", request)
        self._succeeded("/update_weights_from_disk", body)

    async def _relabel(self, label: str) -> None:
        """Loading has set the label."""

    async def _clear(self) -> None:
        if self._mode == "in_place":
            await self._flush()

    async def _flush(self) -> None:
        """Drop prefixes that older weights have filled. With requests in flight SGLang does not: then their contexts are given up, too."""
        try:
            await self._flush_once()
        except CallRefused:
            await self._calls.call("POST", "/pause_generation", {"mode": "retract"})
            await self._flush_once()

    async def _flush_once(self) -> None:
        answer = await self._calls.call("POST", "/flush_cache", {})
        if says_no(answer):
            raise CallRefused(f"{self._calls.name}: {self._calls.url} did not reset its prefix cache: {excerpt(answer)}", 200)

    async def _resume(self) -> None:
        await self._calls.call("POST", "/continue_generation", {})

    async def _disown(self) -> None:
        await self._calls.call("POST", "/update_weight_version", {"new_version": NOBODYS_LABEL, "abort_all_requests": True})

    async def _halt(self) -> None:
        await self._calls.call("POST", "/pause_generation", {"mode": "abort"})

    def _succeeded(self, path: str, body: bytes) -> None:
        try:
            done: _Done = decode_json(body, _Done)
        except msgspec.MsgspecError as error:
            raise EngineFailed(f"{self._calls.name}: POST {self._calls.url}{path} was answered in no known way: {excerpt(body)}") from error
        if not done.success:
            raise CallRefused(f"{self._calls.name}: POST {self._calls.url}{path} failed: {excerpt(done.message.encode())}", 200)
