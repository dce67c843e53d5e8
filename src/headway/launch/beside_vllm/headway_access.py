"""Asks for the engine's key on every path of a launched vLLM (`--middleware headway_access.AskForKey`), `/health` and `/metrics` left out.

vLLM's own check covers `/v1` and `/inference`, not `/collective_rpc`, `/pause` and their like: whoever reaches the port could replace the
weights. Imported by vLLM's Python: nothing but the standard library.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY = "VLLM_API_KEY"
OPEN = frozenset({"/health", "/metrics"})

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class AskForKey:
    """An ASGI middleware: a request without the key in VLLM_API_KEY is answered 401; no key set, and it lets all pass."""

    def __init__(self, app: App) -> None:
        self._app = app
        key = os.environ.get(KEY, "")
        self._expected = f"Bearer {key}".encode() if key else b""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if self._passes(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _passes(self, scope: Message) -> bool:
        if scope["type"] not in {"http", "websocket"} or not self._expected or scope["path"] in OPEN:
            return True
        shown = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        return hmac.compare_digest(shown, self._expected)
