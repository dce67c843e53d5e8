"""The administrative calls of the fake engine, carried out honestly: pauses, loads, labels, caches, health."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headway.testing.engine.calls import BASE_MODEL
from headway.testing.engine.lora import Adapters
from headway.testing.engine.script import EngineScript
from headway.testing.engine.weights import LoadFailed, PauseMode, Weights
from headway.testing.log import FakeLog

_VLLM = {
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/collective_rpc"),
    ("GET", "/weight_info"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/inference/v1/abort_requests"),
    ("GET", "/version"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
}
_SGLANG = {
    ("POST", "/update_weights_from_disk"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/flush_cache"),
    ("GET", "/flush_cache"),
    ("POST", "/abort_request"),
    ("GET", "/get_model_info"),
    ("GET", "/model_info"),
    ("GET", "/get_server_info"),
    ("GET", "/server_info"),
    ("GET", "/ready"),
    ("POST", "/load_lora_adapter"),
    ("POST", "/unload_lora_adapter"),
    ("POST", "/release_memory_occupation"),
    ("POST", "/resume_memory_occupation"),
}
_BOTH = {("GET", "/health"), ("GET", "/v1/models"), ("POST", "/update_weight_version")}
PATHS = {"vllm": _VLLM | _BOTH, "sglang": _SGLANG | _BOTH, "both": _VLLM | _SGLANG | _BOTH}
"""By what a script `speaks`: method and path of every administrative call."""

_SGLANG_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "stale"}


class Administration:
    """Carries calls out on one engine's weights and adapters.

    `abort`: ends generations, all or by name; `idle`: returns when none runs; `runs`: whether one does.
    """

    def __init__(
        self,
        weights: Weights,
        adapters: Adapters,
        log: FakeLog,
        script: EngineScript,
        abort: Callable[[Sequence[str] | None], None],
        idle: Callable[[], Awaitable[None]],
        runs: Callable[[], bool],
    ) -> None:
        self._weights = weights
        self._adapters = adapters
        self._log = log
        self._script = script
        self._abort = abort
        self._idle = idle
        self._runs = runs

    async def carry_out(self, path: str, query: dict[str, str], body: Any) -> tuple[int, bytes]:
        """Do what a call asks for; returns status and body."""
        weights = self._weights
        match path:
            case "/pause":
                mode = query.get("mode", "abort")
                clear = query.get("clear_cache", "true").lower() in {"true", "1"}
                return await self._pause("stale" if mode == "keep" and not clear else mode, clear=clear)  # type: ignore[arg-type]
            case "/pause_generation":
                mode = _SGLANG_MODES.get(str(body.get("mode", "abort")), "abort")
                return await self._pause(mode, clear=mode == "keep")
            case "/resume" | "/continue_generation":
                weights.open_gates()
                return _json({"status": "resumed"})
            case "/is_paused":
                return _json({"is_paused": weights.pause is not None})
            case "/ready":
                return (503, b"") if weights.pause is not None or weights.asleep else (200, b"")
            case "/collective_rpc":
                return await self._load(str((body.get("kwargs") or {}).get("weights_path")), refusal=500, answer={"results": [None]})
            case "/update_weights_from_disk":
                return await self._update(body)
            case "/update_weight_version":
                if self._script.speaks == "sglang" and body.get("abort_all_requests", True):
                    self._abort(None)
                weights.label = str(body["new_version"])
                return _json({"success": True, "new_version": weights.label})
            case "/reset_prefix_cache" | "/flush_cache":
                weights.clear_cache()
                return _json({"success": True})
            case "/inference/v1/abort_requests":
                self._abort([str(name) for name in body.get("request_ids", [])])
            case "/abort_request":
                self._abort(None if body.get("abort_all") else [str(body.get("rid"))])
            case "/sleep" | "/release_memory_occupation":
                weights.sleep(keeps=query.get("level", "1") == "1" and path == "/sleep")
            case "/wake_up" | "/resume_memory_occupation":
                weights.wake()
            case "/v1/load_lora_adapter" | "/load_lora_adapter":
                return self._adapters.load(body, sglang=not path.startswith("/v1"))
            case "/v1/unload_lora_adapter" | "/unload_lora_adapter":
                return self._adapters.unload(body, sglang=not path.startswith("/v1"))
            case _:
                return self._told(path)
        return 200, b""

    def _told(self, path: str) -> tuple[int, bytes]:
        """Answer what only asks."""
        weights, script = self._weights, self._script
        match path:
            case "/weight_info":
                return _json({"weight_version": weights.label})
            case "/get_model_info" | "/model_info":
                return _json({"model_path": script.model, "is_generation": True, "weight_version": weights.label})
            case "/get_server_info" | "/server_info":
                facts = {"version": script.version, "model_path": script.model, "weight_version": weights.label}
                return _json({**facts, "context_length": script.context, "internal_states": [{}]})
            case "/version":
                return _json({"version": script.version})
            case "/is_sleeping":
                return _json({"is_sleeping": weights.asleep})
            case "/v1/models":
                base = {"id": BASE_MODEL, "object": "model", "root": script.model or BASE_MODEL, "parent": None}
                adapters = [
                    {"id": name, "object": "model", "root": root, "parent": BASE_MODEL} for name, root in self._adapters.loaded.items()
                ]
                return _json({"object": "list", "data": [{**base, "max_model_len": script.context}, *adapters]})
        return 200, b""

    async def _pause(self, mode: PauseMode, *, clear: bool) -> tuple[int, bytes]:
        self._weights.close_gates(mode if self._script.pause_holds else "wait")
        if mode == "abort":
            self._abort(None)
        if mode == "wait":
            await self._idle()
        if clear:
            self._weights.recompute()
            if self._script.pause_clears:
                self._weights.clear_cache()
        return _json({"status": "paused"})

    async def _update(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """SGLang's one call for weights and label; unpaused it waits for what is in flight."""
        if body.get("abort_all_requests"):
            self._abort(None)
        if self._weights.pause is None:
            self._weights.close_gates("wait")
            try:
                await self._idle()
                return await self._updated(body)
            finally:
                self._weights.open_gates()
        return await self._updated(body)

    async def _updated(self, body: dict[str, Any]) -> tuple[int, bytes]:
        flushes = bool(body.get("flush_cache", True))
        if flushes and self._weights.pause == "stale" and self._runs():
            return 400, json.dumps({"success": False, "message": "Cache flush failed: requests are in flight"}).encode()
        status, answer = await self._load(str(body["model_path"]), refusal=400, answer={"success": True, "message": ""})
        if status == 200:
            self._weights.label = str(body.get("weight_version") or self._weights.label)
            if flushes:
                self._weights.clear_cache()
        return status, answer

    async def _load(self, directory: str, *, refusal: int, answer: Any) -> tuple[int, bytes]:
        if self._script.load_seconds:
            await asyncio.sleep(self._script.load_seconds)
        try:
            version, whole = self._weights.load(directory)
        except LoadFailed as error:
            return refusal, json.dumps({"success": False, "message": str(error), "error": {"message": str(error)}}).encode()
        self._log.add("loaded", version=version, directory=directory, whole=whole)
        return _json(answer)


def _json(value: Any) -> tuple[int, bytes]:
    return 200, json.dumps(value).encode()
