"""An HTTP server that does nothing: `client.py` asks it, from a process of its own.

It answers each generation with the same bytes, at once, or, after GET /hold/<n>, when n of them are in (or after `HOLD_SECONDS`); GET
/stats tells how many were held at most.
"""

from __future__ import annotations

import asyncio
import json

HOLD_SECONDS = 120.0
PATHS: dict[str, str] = {"vllm": "/inference/v1/generate", "sglang": "/generate"}


class NullServer(asyncio.Protocol):
    """One connection. Whatever is asked for, the answer is the same bytes; but for /stats and /hold/<n>, which talk about the server."""

    answers: dict[bytes, bytes] = {}  # noqa: RUF012
    held: list[asyncio.Transport] = []  # noqa: RUF012
    hold = peak = 0
    patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        buffer = self.buffer + data if self.buffer else data
        head = buffer.find(b"\r\n\r\n")
        while head >= 0:
            at = buffer.find(b"ontent-Length: ", 0, head)
            end = head + 4 + (int(buffer[at + 15 : buffer.find(b"\r", at)]) if at >= 0 else 0)
            if len(buffer) < end:
                break
            self.answer(buffer[: buffer.find(b"\r")].split(b" ")[1])
            buffer = buffer[end:]
            head = buffer.find(b"\r\n\r\n")
        self.buffer = buffer

    def answer(self, path: bytes) -> None:
        server = NullServer
        if path == b"/stats":
            self.transport.write(_http(json.dumps({"peak": server.peak}).encode()))
        elif path.startswith(b"/hold/"):
            server.hold, server.peak = int(path[6:]), 0
            server.patience = asyncio.get_running_loop().call_later(HOLD_SECONDS, server.let_go)
            self.transport.write(_http(b"{}"))
        elif server.hold and path == next(iter(server.answers)):
            server.held.append(self.transport)
            server.peak = max(server.peak, len(server.held))
            if len(server.held) >= server.hold:
                server.let_go()
        else:
            self.transport.write(server.answers[path])

    @staticmethod
    def let_go() -> None:
        server = NullServer
        server.hold = 0
        if server.patience is not None:
            server.patience.cancel()
        for transport in server.held:
            transport.write(next(iter(server.answers.values())))
        server.held.clear()


def _http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def answer_of(kind: str, tokens: int) -> bytes:
    ids = [1000 + i for i in range(tokens)]
    spans = [{"version": "null-3", "start": 0, "end": tokens}]
    if kind == "sglang":
        entries = [[-0.5 - i / 64, token, None] for i, token in enumerate(ids)]
        meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": entries, "weight_versions": spans}
        return json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()
    content = [{"token_id": token, "logprob": -0.5 - i / 64, "rank": 1} for i, token in enumerate(ids)]
    choice = {"index": 0, "token_ids": ids, "finish_reason": "length", "logprobs": {"content": content}, "weight_versions": spans}
    return json.dumps({"request_id": "null", "choices": [choice]}).encode()


async def serve(kind: str, tokens: int) -> None:
    label = _http(b'{"weight_version": "null-3"}')  # asked for until an answer has named versions
    NullServer.answers = {PATHS[kind].encode(): _http(answer_of(kind, tokens)), b"/weight_info": label, b"/get_model_info": label}
    server = await asyncio.get_running_loop().create_server(NullServer, "127.0.0.1", 0, backlog=16384)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
