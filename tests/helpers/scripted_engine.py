"""A real HTTP server that speaks the vLLM subset headway uses, and answers as a script says.

It logs every request; the script, a function from a request to a reply, decides what comes back: tokens, a status, or nothing until the
client goes away. Weight labels, pause and resume behave as in vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web

Request = dict[str, Any]
"""A generate request as it arrived: `request_id`, `token_ids`, `sampling_params`."""


@dataclass(frozen=True)
class Tokens:
    """A 200 with these ids. Unset: logprobs of -0.5 - i / 8 (exact in float32), one span under the engine's label."""

    ids: Sequence[int]
    finish: str | None = "stop"
    logprobs: Sequence[float] | None = None
    spans: Sequence[tuple[str, int, int]] | None = None
    without: tuple[str, ...] = ()  # keys left out of the choice


@dataclass(frozen=True)
class Status:
    """An answer with this status and body."""

    status: int
    body: str = "scripted"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Hold:
    """No answer until `release` is set; then `reply`."""

    release: asyncio.Event
    reply: Tokens = field(default_factory=lambda: Tokens([1]))


class Break:
    """The connection is cut without an answer."""


Reply = Tokens | Status | Hold | Break
Script = Callable[[Request], Reply]


def replies(*script: Reply) -> Script:
    """Answer the n-th request by the n-th reply, and all further ones by the last."""
    left = list(script)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]


def logprob(index: int) -> float:
    """Return the log-probability that an answer's token at `index` has by default."""
    return -0.5 - index / 8


class ScriptedEngine:
    """The server; use it as an async context. `requests` and `admin` log what arrived, `gone` counts clients that went away."""

    def __init__(self, script: Script | Reply, *, label: str = "default", host: str = "127.0.0.1") -> None:
        self.script: Script = script if callable(script) else replies(script)
        self.label = label
        self.requests: list[Request] = []
        self.admin: list[str] = []
        self.refusals: dict[str, list[Reply]] = {}  # path to replies that come before an administrative call works
        self.paused = False
        self.running = self.peak = self.gone = 0
        self.changed = asyncio.Condition()
        self._host = host
        self._runner: web.ServerRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        """Listen on a free port."""
        self._runner = web.ServerRunner(web.Server(self._answer, handler_cancellation=True, access_log=None), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0, backlog=1024).start()
        port = self._runner.addresses[0][1]
        self.url = f"http://[{self._host}]:{port}" if ":" in self._host else f"http://{self._host}:{port}"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop."""
        assert self._runner is not None
        await self._runner.cleanup()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; looked at whenever a request arrives or ends."""
        async with asyncio.timeout(120), self.changed:
            await self.changed.wait_for(condition)

    async def _answer(self, http: web.BaseRequest) -> web.StreamResponse:
        if http.path != "/inference/v1/generate":
            return await self._administer(http)
        request = await http.json()
        if request["request_id"].startswith("probe-"):  # who administers it looks whether its logprobs are processed ones: they are
            count = request["sampling_params"]["max_tokens"]
            return await self._reply(http, Tokens([1] * count, logprobs=[0.0] * count))
        self.requests.append(request)
        self.running += 1
        self.peak = max(self.peak, self.running)
        await self._notify()
        try:
            return await self._reply(http, self.script(request))
        except asyncio.CancelledError:
            self.gone += 1
            raise
        finally:
            self.running -= 1
            await asyncio.shield(self._notify())

    async def _reply(self, http: web.BaseRequest, reply: Reply) -> web.StreamResponse:
        match reply:
            case Tokens():
                return web.json_response({"request_id": "scripted", "choices": [self._choice(reply)]})
            case Status():
                return web.Response(status=reply.status, text=reply.body, headers=reply.headers)
            case Hold():
                await reply.release.wait()
                return await self._reply(http, reply.reply)
            case Break():
                assert http.transport is not None
                http.transport.abort()
                return web.Response()

    def _choice(self, reply: Tokens) -> dict[str, Any]:
        logprobs = [logprob(i) for i in range(len(reply.ids))] if reply.logprobs is None else reply.logprobs
        spans = [(self.label, 0, len(reply.ids))] if reply.spans is None else reply.spans
        choice = {
            "index": 0,
            "token_ids": list(reply.ids),
            "finish_reason": reply.finish,
            "stop_reason": None,
            "logprobs": {"content": [{"token_id": 0, "logprob": value, "rank": 1} for value in logprobs]},
            "weight_versions": [{"version": version, "start": start, "end": end} for version, start, end in spans],
        }
        return {key: value for key, value in choice.items() if key not in reply.without}

    async def _administer(self, http: web.BaseRequest) -> web.StreamResponse:
        self.admin.append(http.path_qs)
        refusals = self.refusals.get(http.path)
        if refusals:
            return await self._reply(http, refusals.pop(0))
        body = await http.json() if http.can_read_body else {}
        match http.path:
            case "/pause" | "/resume":
                self.paused = http.path == "/pause"
                return web.json_response({"status": "ok"})
            case "/is_paused":
                return web.json_response({"is_paused": self.paused})
            case "/update_weight_version":
                self.label = body["new_version"]
                return web.json_response({"success": True, "new_version": self.label})
            case "/weight_info":
                return web.json_response({"weight_version": self.label})
            case "/collective_rpc":
                self.admin[-1] += f" {body['method']} {body['kwargs']['weights_path']}"
                return web.json_response({"results": [None]})
            case "/reset_prefix_cache" | "/health":
                return web.Response()
            case _:
                return web.Response(status=404, text="not served here")

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()
