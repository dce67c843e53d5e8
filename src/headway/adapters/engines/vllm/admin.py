"""Administers one engine that speaks vLLM's protocol: its label, and the steps by which it takes new weights (`administration`).

A reload neither pauses nor labels nor clears a cache by itself, and a failed one may leave weights of two versions behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from headway.adapters.engines.administration import NOBODYS_LABEL, AdministeredEngine, counter_of, says_no
from headway.adapters.engines.calls import CallRefused
from headway.adapters.engines.generation import excerpt
from headway.adapters.engines.verification import Token
from headway.adapters.engines.vllm.wire import GENERATE_PATH, LABEL_PATH, read_label
from headway.errors import EngineFailed
from headway.formats.bounded import decode_json
from headway.formats.software import UNKNOWN, stated
from headway.types import Checkpoint, EngineKind

_PAUSE_MODES = {"in_flight": "keep", "wait": "wait", "abort_resume": "abort"}
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

    async def _own_label(self) -> str:
        body = await self._calls.call("GET", LABEL_PATH)
        try:
            return read_label(body)
        except msgspec.DecodeError as error:
            raise EngineFailed(f"{self._name}: {self._url}{LABEL_PATH} named no weight_version: {excerpt(body)}") from error

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

    async def _serve(self) -> None:
        if self._keeps_cache:
            await self._reset_cache()
        await self._resume()

    async def _reset_cache(self) -> None:
        """Drop cached prefixes. Requests that run may hold some of them: then their contexts are computed anew, for none may be stale."""
        answer = await self._calls.call("POST", "/reset_prefix_cache")
        if says_no(answer):
            answer = await self._calls.call("POST", "/reset_prefix_cache?reset_running_requests=true")
        if says_no(answer):
            raise EngineFailed(f"{self._name}: {self._url} did not reset its prefix cache: {excerpt(answer)}")

    async def _resume(self) -> None:
        await self._calls.call("POST", "/resume")

    async def _disown(self) -> None:
        await self._relabel(NOBODYS_LABEL)
        await self._halt()

    async def _halt(self) -> None:
        await self._calls.call("POST", "/pause?mode=abort&clear_cache=true")

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
        request = {"request_id": request_id, "prompt": ids, "return_token_ids": True, **sampling, **model}
        completed: _Completed = decode_json(await self._calls.call("POST", "/v1/completions", request), _Completed)
        [completion] = completed.choices
        return _paired(completion.token_ids, completion.logprobs.token_logprobs)


def _paired(ids: list[int], logprobs: list[float]) -> list[Token]:
    return [Token(token, logprob) for token, logprob in zip(ids, logprobs, strict=True)]
