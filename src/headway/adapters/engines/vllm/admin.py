"""Administers one engine that speaks vLLM's protocol (`administration`): what it is, its memory, and the tokens that it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from headway.adapters.engines.administration import AdministeredEngine, counter_of
from headway.adapters.engines.calls import CallRefused
from headway.adapters.engines.verification import Token
from headway.adapters.engines.vllm.completions import NEUTRAL
from headway.adapters.engines.vllm.weights import VllmWeights
from headway.adapters.engines.vllm.wire import GENERATE_PATH
from headway.errors import EngineFailed
from headway.formats.bounded import decode_json
from headway.formats.software import UNKNOWN, stated
from headway.types import EngineKind

_CLOSED = frozenset({403})  # a vLLM without --enable-scale-out
_NO_ROUTE = _CLOSED | {404}  # an older one; where an adapter is asked for, it may be the adapter that is not there


class _Version(msgspec.Struct, frozen=True):
    version: str
    software: str = "vllm"


class _Entry(msgspec.Struct, frozen=True):
    logprob: float


class _Content(msgspec.Struct, frozen=True):
    content: list[_Entry]


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int]
    logprobs: _Content


class _Generated(msgspec.Struct, frozen=True):
    choices: list[_Choice]


class _Listed(msgspec.Struct, frozen=True):
    token_logprobs: list[float]


class _Completion(msgspec.Struct, frozen=True):
    token_ids: list[int]
    logprobs: _Listed


class _Completed(msgspec.Struct, frozen=True):
    choices: list[_Completion]


class VllmEngine(AdministeredEngine):
    """The administrative side of one vLLM-speaking server."""

    kind: ClassVar[EngineKind] = "vllm"
    _COUNTER = counter_of("vllm:generation_tokens_total")
    _WHOLE = VllmWeights
    _RAW_REMEDY = "start it with --logprobs-mode processed_logprobs"
    _HINT_404 = "is the server started with VLLM_SERVER_DEV_MODE=1? is it a vLLM (engine.kind)?"
    _LORA_PREFIX = "/v1"

    async def software(self) -> str:
        """Return what GET /version says: "vllm" and the version, or another name where `software` gives one; otherwise "unknown"."""
        try:
            answer: _Version = decode_json(await self._calls.brief("/version"), _Version)
        except (EngineFailed, TimeoutError, msgspec.MsgspecError):
            return UNKNOWN
        return stated(f"{answer.software} {answer.version}" if answer.version else "")

    async def sleep(self) -> None:
        """Free weights and cache (POST /sleep; the server needs --enable-sleep-mode)."""
        await self._calls.call("POST", "/sleep?level=2")

    async def wake(self) -> None:
        """Take the memory again (POST /wake_up); its weights are to be synced before it serves."""
        await self._calls.call("POST", "/wake_up")

    async def _sample(
        self, token_ids: Sequence[int], *, temperature: float, likeliest: bool, max_tokens: int, request_id: str, adapter: str
    ) -> list[Token]:
        sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": 0, "logprobs": 0, "ignore_eos": True}
        if likeliest:
            sampling["top_k"] = 1
        model = {"model": adapter} if adapter else {}
        ids = list(token_ids)
        try:
            request = {"request_id": request_id, "token_ids": ids, "sampling_params": sampling, "stream": False, **model}
            generated: _Generated = decode_json(await self._calls.call("POST", GENERATE_PATH, request), _Generated)
        except CallRefused as error:
            if error.status not in (_NO_ROUTE if not adapter else _CLOSED):
                raise
        else:
            [choice] = generated.choices
            return _paired(choice.token_ids, [entry.logprob for entry in choice.logprobs.content])
        request = {"request_id": request_id, "prompt": ids, "return_token_ids": True, **NEUTRAL, **sampling, **model}
        completed: _Completed = decode_json(await self._calls.call("POST", "/v1/completions", request), _Completed)
        [completion] = completed.choices
        return _paired(completion.token_ids, completion.logprobs.token_logprobs)


def _paired(ids: list[int], logprobs: list[float]) -> list[Token]:
    return [Token(token, logprob) for token, logprob in zip(ids, logprobs, strict=True)]
