"""Administers one SGLang server (`administration`): what it is, its memory, and the tokens that it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from headway.adapters.engines.administration import AdministeredEngine, counter_of
from headway.adapters.engines.sglang.weights import SglangWeights
from headway.adapters.engines.verification import Token
from headway.errors import EngineFailed
from headway.formats.bounded import decode_json
from headway.formats.software import UNKNOWN, stated
from headway.types import EngineKind

_LIKELIEST_MASS = 1e-4  # top_p: with top_k = 1 SGLang takes it for greedy decoding, which has log-probabilities of its own


class _Server(msgspec.Struct, frozen=True):
    version: str = ""


class _Meta(msgspec.Struct, frozen=True):
    output_token_logprobs: list[tuple[float, int, str | None]]


class _Generated(msgspec.Struct, frozen=True):
    output_ids: list[int]
    meta_info: _Meta


class SglangEngine(AdministeredEngine):
    """The administrative side of one SGLang server."""

    kind: ClassVar[EngineKind] = "sglang"
    _COUNTER = counter_of("sglang:generation_tokens_total")
    _WHOLE = SglangWeights
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
