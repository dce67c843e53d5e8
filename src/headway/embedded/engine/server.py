"""The HTTP face of the engine: vLLM's paths and answers, read from and handed to the model's thread.

Built on aiohttp's low-level server: one dictionary look-up instead of a router, no middleware, no access log, because a batch of short
requests is hundreds of calls and nothing else. A client that disconnects cancels its handler, and so its request.
"""

from __future__ import annotations

import hmac
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from safetensors import SafetensorError

from headway import __version__
from headway.embedded.engine import messages
from headway.embedded.engine.request import Request
from headway.embedded.engine.scheduler import PauseMode, Scheduler
from headway.embedded.engine.thread import ModelThread
from headway.errors import EngineFailed, StorageError

MAX_BODY_BYTES = 16 << 20  # a context of two million ids
SEED_MASK = 2**64 - 1

Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]


class Refused(Exception):
    """A request that gets an error answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class EngineApi:
    """Answers requests for one model. `name`: what /v1/models calls it; `key`: what each request must show, empty: nothing."""

    def __init__(self, thread: ModelThread, scheduler: Scheduler, *, name: str, key: str = "") -> None:
        self._authorization = f"Bearer {key}".encode() if key else b""
        self._thread = thread
        self._scheduler = scheduler  # its counters and label only: everything else goes through the thread
        self._name = name
        self._context = scheduler.context
        self._keys = itertools.count()
        self._in_flight: dict[str, int] = {}
        self._started = int(time.time())
        self._decode_generate = msgspec.json.Decoder(messages.GenerateRequest).decode
        self._routes: dict[tuple[str, str], Handler] = {
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/inference/v1/abort_requests"): self._abort,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/collective_rpc"): self._collective_rpc,
            ("POST", "/update_weight_version"): self._update_version,
            ("GET", "/weight_info"): self._weight_info,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("GET", "/health"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
        }

    def server(self) -> web.Server:
        """Return the server to listen with; call it on the running loop."""
        return web.Server(
            self.answer,
            request_factory=_request_factory,
            handler_cancellation=True,
            access_log=None,
        )

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer one HTTP request; every error is JSON in vLLM's form."""
        handler = self._routes.get((request.method, request.path))
        try:
            if self._authorization and request.path != "/health":
                given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
                if not hmac.compare_digest(given, self._authorization):
                    raise Refused(401, "Authorization: Bearer KEY is missing or wrong: this engine was started with HEADWAY_ENGINE_KEY")
            if handler is None:
                raise Refused(404, f"{request.method} {request.path} is not served here")
            return await handler(request)
        except Refused as error:
            return _error(error.status, str(error))
        except (msgspec.MsgspecError, RecursionError) as error:
            return _error(400, f"{request.path}: {error}")
        except StorageError as error:  # a checkpoint that is damaged, or does not fit
            return _error(400, str(error))
        except EngineFailed as error:
            return _error(503, str(error))
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is longer than {MAX_BODY_BYTES} bytes")

    # Generation -----------------------------------------------------------------------------------------------------------------------

    async def _generate(self, http: web.BaseRequest) -> web.Response:
        call = self._decode_generate(await http.read())
        key = next(self._keys)
        request_id = messages.REQUEST_PREFIX + (call.request_id or http.headers.get("X-Request-Id") or f"{key:x}")
        if not request_id.isprintable():  # a header may hold bytes that are no text, and no answer could name it
            raise Refused(400, f"request_id {request_id!a} is no printable text: choose another one")
        if request_id in self._in_flight:
            raise Refused(400, f"request_id {request_id} is in flight already: choose another one")
        request = self._request(key, call)
        self._in_flight[request_id] = key
        try:
            ended = await self._thread.generate(request)
        finally:
            del self._in_flight[request_id]
        body = messages.generated(
            ended,
            request_id=request_id,
            with_logprobs=call.sampling_params.logprobs is not None,
            eos_ids=self._scheduler.eos_ids,
        )
        return web.Response(body=body, content_type="application/json")

    def _request(self, key: int, call: messages.GenerateRequest) -> Request:
        """Return the request to schedule, or refuse what can never be served."""
        prompt, sampling = call.token_ids, call.sampling_params
        room = self._context - len(prompt)
        if room < 1:
            raise Refused(400, f"the prompt has {len(prompt)} tokens and the context {self._context}: no room for an output token")
        vocabulary = self._scheduler.vocabulary
        if not (min(prompt) >= 0 and max(prompt) < vocabulary):
            wrong = next(token for token in prompt if not 0 <= token < vocabulary)
            raise Refused(400, f"token id {wrong} is outside the vocabulary: ids are 0 to {vocabulary - 1}")
        if call.stream:
            raise Refused(400, "stream = true is not served by the embedded engine: leave it out")
        if call.model is not None and call.model != self._name:
            raise Refused(404, f'the model "{call.model}" does not exist: this engine serves "{self._name}"')
        stops = tuple(token for token in sampling.stop_token_ids or () if 0 <= token < vocabulary)
        return Request(
            key=key,
            prompt=prompt,
            max_tokens=min(sampling.max_tokens or room, room),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=min(max(sampling.top_k, 0), vocabulary),
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed & SEED_MASK,
            stop_ids=stops if sampling.ignore_eos else stops + self._scheduler.eos_ids,
        )

    async def _abort(self, http: web.BaseRequest) -> web.Response:
        call = msgspec.json.decode(await http.read(), type=messages.AbortRequest)
        self._thread.abort([self._in_flight[name] for name in call.request_ids if name in self._in_flight])
        return web.Response()

    # Weights and pauses ---------------------------------------------------------------------------------------------------------------

    async def _pause(self, http: web.BaseRequest) -> web.Response:
        mode = msgspec.convert(http.query.get("mode", "abort"), PauseMode)
        await self._thread.pause(mode, recompute=_flag(http.query, "clear_cache", default=True))
        return _json({"status": "paused"})

    async def _resume(self, http: web.BaseRequest) -> web.Response:
        await self._thread.call(Scheduler.resume)
        return _json({"status": "resumed"})

    async def _is_paused(self, http: web.BaseRequest) -> web.Response:
        return _json({"is_paused": self._scheduler.pausing is not None})

    async def _collective_rpc(self, http: web.BaseRequest) -> web.Response:
        call = msgspec.json.decode(await http.read(), type=messages.CollectiveRpc)
        directory = call.kwargs.get("weights_path")
        if call.method != "reload_weights" or not isinstance(directory, str):
            raise Refused(400, 'only {"method": "reload_weights", "kwargs": {"weights_path": directory}} is served here')
        try:
            await self._thread.call(lambda scheduler: scheduler.load(Path(directory)))
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise Refused(500, f"{directory} could not be read: {error}") from error
        return _json({"results": [None]})

    async def _update_version(self, http: web.BaseRequest) -> web.Response:
        label = msgspec.json.decode(await http.read(), type=messages.NewVersion).new_version
        await self._thread.call(lambda scheduler: scheduler.relabel(label))
        return _json({"success": True, "new_version": label})

    async def _weight_info(self, http: web.BaseRequest) -> web.Response:
        return _json({"weight_version": self._scheduler.label})

    async def _reset_prefix_cache(self, http: web.BaseRequest) -> web.Response:
        return web.Response()  # nothing is cached across requests

    # State ----------------------------------------------------------------------------------------------------------------------------

    async def _health(self, http: web.BaseRequest) -> web.Response:
        if self._thread.died.done():
            raise EngineFailed(f"the model thread died: {self._thread.died.result()!r}")
        return web.Response()

    async def _version(self, http: web.BaseRequest) -> web.Response:
        return _json({"version": __version__, "software": "headway"})  # vLLM names no software

    async def _models(self, http: web.BaseRequest) -> web.Response:
        model = {"id": self._name, "object": "model", "created": self._started, "owned_by": "headway", "max_model_len": self._context}
        return _json({"object": "list", "data": [model]})

    async def _metrics(self, http: web.BaseRequest) -> web.Response:
        state = self._scheduler
        waiting, held = len(state.waiting), len(state.held)
        rows = [
            ("gauge", "num_requests_running", "", len(state.live)),
            ("gauge", "num_requests_waiting", "", waiting + held),
            ("gauge", "num_requests_waiting_by_reason", 'reason="capacity"', waiting),
            ("gauge", "num_requests_waiting_by_reason", 'reason="deferred"', held),
            ("gauge", "kv_cache_usage_perc", "", len(state.live) / state.max_rows),
            ("counter", "num_preemptions_total", "", state.recomputed),
            ("counter", "prompt_tokens_total", "", state.prompt_tokens),
            ("counter", "generation_tokens_total", "", state.generated_tokens),
        ]
        lines: list[str] = []
        for kind, name, label, value in rows:
            declaration = f"# TYPE vllm:{name} {kind}"
            if declaration not in lines:
                lines.append(declaration)
            labels = ",".join(filter(None, (f'model_name="{self._name}"', label)))
            lines.append(f"vllm:{name}{{{labels}}} {value}")
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")


def _request_factory(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    return web.BaseRequest(message, payload, protocol, writer, task, task.get_loop(), client_max_size=MAX_BODY_BYTES)


def _flag(query: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = query.get(name, str(default)).lower()
    if text not in {"true", "false", "1", "0"}:
        raise Refused(400, f'{name} is "{text}": it must be true or false')
    return text in {"true", "1"}


def _json(value: Any) -> web.Response:
    return web.Response(body=messages.encode(value), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    body = messages.encode(
        {"error": {"message": message, "type": "invalid_request_error" if status < 500 else "server_error", "code": status}}
    )
    return web.Response(status=status, body=body, content_type="application/json")
