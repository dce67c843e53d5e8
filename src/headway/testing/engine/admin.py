"""The administrative calls of the fake engine, carried out honestly: pauses, loads, labels, caches, health."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headway.testing.engine.script import EngineScript
from headway.testing.engine.weights import LoadFailed, PauseMode, Weights
from headway.testing.log import FakeLog

PATHS = {
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/collective_rpc"),
    ("POST", "/update_weight_version"),
    ("GET", "/weight_info"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/inference/v1/abort_requests"),
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/v1/models"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/flush_cache"),
    ("GET", "/flush_cache"),
    ("POST", "/abort_request"),
    ("GET", "/get_model_info"),
    ("GET", "/ready"),
}
_SGLANG_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "stale"}


class Administration:
    """Carries calls out on one engine's weights. `abort`: ends generations, all or by name; `idle`: returns when none runs."""

    def __init__(
        self,
        weights: Weights,
        log: FakeLog,
        script: EngineScript,
        abort: Callable[[Sequence[str] | None], None],
        idle: Callable[[], Awaitable[None]],
    ) -> None:
        self._weights = weights
        self._log = log
        self._script = script
        self._abort = abort
        self._idle = idle

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
                return (503, b"") if weights.pause is not None else (200, b"")
            case "/collective_rpc":
                return await self._load(str((body.get("kwargs") or {}).get("weights_path")), refusal=500, answer={"results": [None]})
            case "/update_weights_from_disk":
                return await self._update(body)
            case "/update_weight_version":
                weights.label = str(body["new_version"])
                return _json({"success": True, "new_version": weights.label})
            case "/weight_info" | "/get_model_info":
                return _json({"weight_version": weights.label})
            case "/reset_prefix_cache" | "/flush_cache":
                weights.clear_cache()
                return _json({"success": True})
            case "/inference/v1/abort_requests":
                self._abort(body.get("request_ids", []))
            case "/abort_request":
                self._abort(None if body.get("abort_all") else [str(body.get("rid"))])
            case "/version":
                return _json({"version": self._script.version})
            case "/v1/models":
                return _json({"object": "list", "data": [{"id": "fake", "max_model_len": self._script.context}]})
        return 200, b""

    async def _pause(self, mode: PauseMode, *, clear: bool) -> tuple[int, bytes]:
        self._weights.close_gates(mode)
        if mode == "abort":
            self._abort(None)
        if mode == "wait":
            await self._idle()
        if clear:
            self._weights.clear_cache()
        return _json({"status": "paused"})

    async def _update(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """SGLang's one call for weights and label; unpaused it waits for what is in flight."""
        if self._weights.pause is None:
            self._weights.close_gates("wait")
            try:
                await self._idle()
                return await self._updated(body)
            finally:
                self._weights.open_gates()
        return await self._updated(body)

    async def _updated(self, body: dict[str, Any]) -> tuple[int, bytes]:
        status, answer = await self._load(str(body["model_path"]), refusal=400, answer={"success": True, "message": ""})
        if status == 200:
            self._weights.label = str(body.get("weight_version") or self._weights.label)
            if body.get("flush_cache", True):
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
