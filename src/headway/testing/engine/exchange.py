"""How an answer of the fake engine leaves: late, never, in pieces, or with a connection that breaks."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from headway.testing.engine.script import Reply

_TRICKLE_BYTES = 64


async def send(http: web.BaseRequest, reply: Reply, honest: bytes, *, after: float) -> web.StreamResponse:
    """Return what to send, or do what is done instead: `after` seconds, `honest` unless the reply has a body of its own."""
    if after:
        await asyncio.sleep(after)
    if reply.hang:
        await asyncio.Event().wait()
    if reply.cut or reply.kill:
        if http.transport is not None:
            http.transport.abort()
        return web.Response()
    body = honest
    if reply.text is not None or reply.json is not None:
        body = (json.dumps(reply.json) if reply.text is None else reply.text).encode()
    kind = reply.content_type or ("text/plain" if reply.text is not None else "application/json")
    if not reply.trickle_seconds:
        return web.Response(status=reply.status, body=body, headers=reply.headers, content_type=kind)
    stream = web.StreamResponse(status=reply.status, headers={**reply.headers, "Content-Type": kind})
    stream.content_length = len(body)
    await stream.prepare(http)
    for start in range(0, len(body), _TRICKLE_BYTES):
        await asyncio.sleep(reply.trickle_seconds)
        await stream.write(body[start : start + _TRICKLE_BYTES])
    await stream.write_eof()
    return stream
