"""Where the fake engine listens: an HTTP server that stops at once, cuts every connection, and comes up again at the same address."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

MAX_BODY_BYTES = 64 << 20
_BACKLOG = 4096


class Listener:
    """Answers each request by `answer`. `port` 0: a free one, taken at the first start."""

    def __init__(self, host: str, port: int, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        self.host, self.port = host, port
        self._answer = answer
        self._runner: web.ServerRunner | None = None
        self._server: web.Server | None = None

    async def start(self) -> str:
        """Listen; return the base URL."""
        self._server = web.Server(self._answer, request_factory=_request_of, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port, backlog=_BACKLOG).start()
        self.port = self._runner.addresses[0][1]
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    async def stop(self) -> None:
        """Stop listening and cut every connection; idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None and self._server is not None:
            for site in list(runner.sites):
                await site.stop()
            for connection in self._server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()


def _request_of(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    return web.BaseRequest(message, payload, protocol, writer, task, task.get_loop(), client_max_size=MAX_BODY_BYTES)
