"""An HTTP server whose connections are bounded: in number, and in the time that each may wait without a whole request header.

Who connects and says nothing, or says it a byte at a time, costs a socket for some seconds. When all places are taken, the connection that
has waited longest makes room; one whose request is being answered never does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Answer = Callable[[web.BaseRequest], Awaitable[web.Response]]


class BoundedServer(web.Server):
    """Hands requests to `answer`. `header_seconds`: until a new connection has sent its first header; `idle_seconds`: its next one."""

    def __init__(self, answer: Answer, *, most: int, header_seconds: float, idle_seconds: float, **options: Any) -> None:
        super().__init__(self._answered, keepalive_timeout=idle_seconds, **options)
        self._answer = answer
        self._most = most
        self._header_seconds = header_seconds
        self._idle_seconds = idle_seconds
        self._open: dict[web.RequestHandler, asyncio.Transport] = {}
        self._waiting: dict[web.RequestHandler, asyncio.TimerHandle] = {}  # for a header; who began to wait first comes first

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Take a connection, or close it where there is no place."""
        super().connection_made(handler, transport)
        self._open[handler] = transport
        if len(self._open) > self._most:
            self._cut(next(iter(self._waiting), handler))
        self._waits(handler, self._header_seconds)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Forget a connection."""
        self._forget(handler)
        super().connection_lost(handler, exc)

    async def _answered(self, request: web.BaseRequest) -> web.Response:
        handler = request.protocol
        self._waits_no_more(handler)
        try:
            return await self._answer(request)
        finally:
            self._waits(handler, self._idle_seconds)

    def _waits(self, handler: web.RequestHandler, seconds: float) -> None:
        if handler in self._open:
            self._waiting[handler] = asyncio.get_running_loop().call_later(seconds, self._cut, handler)

    def _waits_no_more(self, handler: web.RequestHandler) -> None:
        if (timer := self._waiting.pop(handler, None)) is not None:
            timer.cancel()

    def _cut(self, handler: web.RequestHandler) -> None:
        if (transport := self._forget(handler)) is not None:
            transport.abort()

    def _forget(self, handler: web.RequestHandler) -> asyncio.Transport | None:
        self._waits_no_more(handler)
        return self._open.pop(handler, None)
