"""Administers one SGLang server: its label, and the steps by which it takes new weights (`administration`).

One call loads and labels. A sync keeps what is in flight (`retract`: contexts are computed anew under the new weights; `in_place`: they
stay), aborts it (`abort`), or does not pause at all: an update of an unpaused server waits for what is in flight, and lets nothing start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from headway.adapters.engines.administration import NOBODYS_LABEL, AdministeredEngine, counter_of, says_no
from headway.adapters.engines.calls import CallRefused
from headway.adapters.engines.generation import excerpt
from headway.adapters.engines.verification import Token
from headway.adapters.engines.vllm.wire import read_label
from headway.errors import EngineFailed
from headway.formats.bounded import decode_json
from headway.formats.software import UNKNOWN, stated
from headway.types import Checkpoint, EngineKind

_LIKELIEST_MASS = 1e-4  # top_p: with top_k = 1 SGLang takes it for greedy decoding, which has log-probabilities of its own


class _Server(msgspec.Struct, frozen=True):
    version: str = ""


class _Done(msgspec.Struct, frozen=True):
    success: bool = True
    message: str = ""


class _Meta(msgspec.Struct, frozen=True):
    output_token_logprobs: list[tuple[float, int, str | None]]


class _Generated(msgspec.Struct, frozen=True):
    output_ids: list[int]
    meta_info: _Meta


class SglangEngine(AdministeredEngine):
    """The administrative side of one SGLang server."""

    kind: ClassVar[EngineKind] = "sglang"
    _COUNTER = counter_of("sglang:generation_tokens_total")
    _RAW_REMEDY = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment"
    _HINT_404 = "is it an SGLang (engine.kind)?"
    _LORA_PREFIX = ""

    async def software(self) -> str:
        """Return "sglang" and the version that the server's info names; otherwise "unknown"."""
        try:
            answer: _Server = decode_json(await self._calls.brief("/server_info", "/get_server_info"), _Server)
        except (EngineFailed, TimeoutError, msgspec.MsgspecError):
            return UNKNOWN
        return stated(f"sglang {answer.version}" if answer.version else "")

    async def sleep(self) -> None:
        """Free weights and cache (the server needs --enable-memory-saver)."""
        await self._calls.call("POST", "/release_memory_occupation", {})

    async def wake(self) -> None:
        """Take the memory again; its weights are to be synced before it serves."""
        await self._calls.call("POST", "/resume_memory_occupation", {})

    async def _own_label(self) -> str:
        body = await self._calls.first("/model_info", "/get_model_info")
        try:
            return read_label(body)
        except msgspec.DecodeError as error:
            raise EngineFailed(f"{self._name}: {self._url}/model_info named no weight_version: {excerpt(body)}") from error

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

    async def _serve(self) -> None:
        if self._mode == "in_place":
            await self._flush()
        await self._resume()

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
            raise CallRefused(f"{self._name}: {self._url} did not reset its prefix cache: {excerpt(answer)}", 200)

    async def _resume(self) -> None:
        await self._calls.call("POST", "/continue_generation", {})

    async def _disown(self) -> None:
        await self._calls.call("POST", "/update_weight_version", {"new_version": NOBODYS_LABEL, "abort_all_requests": True})

    async def _halt(self) -> None:
        await self._calls.call("POST", "/pause_generation", {"mode": "abort"})

    async def _sample(
        self, token_ids: Sequence[int], *, temperature: float, likeliest: bool, max_tokens: int, request_id: str, adapter: str
    ) -> list[Token]:
        sampling: dict[str, Any] = {"max_new_tokens": max_tokens, "temperature": temperature, "sampling_seed": 0, "ignore_eos": True}
        if likeliest:
            sampling["top_p"] = _LIKELIEST_MASS
        request: dict[str, Any] = {
            "rid": request_id,
            "input_ids": list(token_ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": False,
        }
        if adapter:
            request["lora_path"] = adapter
        answer: _Generated = decode_json(await self._calls.call("POST", "/generate", request), _Generated)
        pairs = zip(answer.output_ids, answer.meta_info.output_token_logprobs, strict=True)
        return [Token(token, entry[0]) for token, entry in pairs]

    def _succeeded(self, path: str, body: bytes) -> None:
        try:
            done: _Done = decode_json(body, _Done)
        except msgspec.MsgspecError as error:
            raise EngineFailed(f"{self._name}: POST {self._url}{path} was answered in no known way: {excerpt(body)}") from error
        if not done.success:
            raise CallRefused(f"{self._name}: POST {self._url}{path} failed: {excerpt(done.message.encode())}", 200)
