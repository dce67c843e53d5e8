"""Requests per second of `EngineClient` beside a bare aiohttp loop, at a null HTTP server in a process of its own; one JSON line.

Per concurrency C = 64 / 1024 / 8192: C tasks send requests one after the other, `--rounds` times in turn with each client. `bare` posts a
body made beforehand and reads the answer; `bare_json` encodes each request and decodes each answer (`--prompt` ids, `--tokens` of them
back) by msgspec, and checks nothing; both open connections as ours does, since thousands at once overrun the server. `ours` is the
product's client. Medians over the rounds count. `_ratio` is ours by theirs, of requests per second, round by round; `_cpu_ratio` theirs by
ours, of this process's CPU time per request, which a slow server does not hide. Before the first round our client opens all C connections
at once, within `connected_seconds`. Then the server holds all answers until C requests are in (or for 30 s): `peak` is how many were.
`descriptors` are those of this process meanwhile, above those it began with: bounded by a connection per request in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any, NamedTuple, Protocol

import aiohttp
import msgspec

from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.connecting import PatientConnector
from headway.adapters.engines.generation import Ask
from headway.adapters.engines.sglang import wire as sglang
from headway.adapters.engines.vllm import wire as vllm
from headway.types import EngineAddress, EngineKind, SamplingParams

CONCURRENCIES = (64, 1024, 8192)
HOLD_SECONDS = 30.0
PATHS: dict[str, str] = {"vllm": "/inference/v1/generate", "sglang": "/generate"}

# The server --------------------------------------------------------------------------------------------------------------------------


class NullServer(asyncio.Protocol):
    """One connection. Whatever is asked for, the answer is the same bytes; but for /stats and /hold/<n>, which talk about the server."""

    answers: dict[bytes, bytes] = {}  # noqa: RUF012
    held: list[asyncio.Transport] = []  # noqa: RUF012
    hold = connections = peak = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        self.transport = transport
        self.buffer = b""
        NullServer.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        NullServer.connections -= 1

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
            self.transport.write(_http(json.dumps({"peak": server.peak, "connections": server.connections}).encode()))
        elif path.startswith(b"/hold/"):
            server.hold, server.peak = int(path[6:]), 0
            asyncio.get_running_loop().call_later(HOLD_SECONDS, server.let_go)
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


# The clients -------------------------------------------------------------------------------------------------------------------------

Send = Callable[[], Awaitable[object]]


class Measured(NamedTuple):
    per_second: float
    cpu_us: float


async def drive(send: Send, concurrent: int, requests: int) -> Measured:
    """`concurrent` tasks send `requests` altogether."""
    numbers = iter(range(requests))

    async def work() -> None:
        for _ in numbers:
            await send()

    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(concurrent)))
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    return Measured(requests / wall, cpu / requests * 1e6)


class Client(Protocol):
    """Either client, once it is done with."""

    async def close(self) -> None: ...


Made = tuple[Send, Client]


def bare_client(url: str, kind: EngineKind, prompt: list[int], *, json_too: bool = False) -> Made:
    session = aiohttp.ClientSession(connector=PatientConnector(keep_seconds=15.0), timeout=aiohttp.ClientTimeout(total=None))
    ask = Ask("train-1-2-3-4-abcdef", prompt, 256, 1.0, 1.0, 0, 1)
    wire = sglang if kind == "sglang" else vllm
    body, address, numbers = wire.encode_request(ask), url + PATHS[kind], itertools.count()
    decode = msgspec.json.Decoder(wire.AnswerJson).decode
    headers = {"Content-Type": "application/json"}

    async def send() -> object:
        async with session.post(address, data=body, headers=headers) as response:
            return await response.read()

    async def send_json() -> object:
        number = next(numbers)
        asked = wire.encode_request(ask._replace(request_id=f"train-1-2-3-{number}", seed=number))
        async with session.post(address, data=asked, headers=headers) as response:
            return decode(await response.read())

    return send_json if json_too else send, session


def our_client(url: str, kind: EngineKind, prompt: list[int]) -> Made:
    client, engine, sampling, numbers = EngineClient("null"), EngineAddress(url, kind), SamplingParams(), itertools.count()

    async def send() -> object:
        number = next(numbers)
        return await client.generate(engine, prompt, sampling, seed=number, max_tokens=256, request_id=f"train-1-2-3-{number}")

    return send, client


async def ask(url: str) -> dict[str, int]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        found: dict[str, int] = await response.json()
        return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- names, not paths


async def measure(url: str, options: argparse.Namespace, concurrent: int) -> dict[str, Any]:
    prompt = list(range(1000, 1000 + options.prompt))
    requests = max(options.requests, concurrent)
    clients: dict[str, Callable[[], Made]] = {
        "ours": lambda: our_client(url, options.kind, prompt),
        "bare_json": lambda: bare_client(url, options.kind, prompt, json_too=True),
        "bare": lambda: bare_client(url, options.kind, prompt),
    }
    held = await hold(url, clients["ours"], concurrent)
    rounds: dict[str, list[Measured]] = {name: [] for name in clients}
    for number in range(options.rounds):
        for name in list(clients)[:: 1 if number % 2 else -1]:
            send, client = clients[name]()
            await drive(send, concurrent, concurrent)  # connections are there
            rounds[name].append(await drive(send, concurrent, requests))
            await client.close()
    ours, row = rounds["ours"], {"requests": requests} | held
    for name, theirs in rounds.items():
        row[f"{name}_per_second"] = round(median(each.per_second for each in theirs))
        row[f"{name}_cpu_us"] = round(median(each.cpu_us for each in theirs), 1)
        if name != "ours":
            row[f"{name}_ratio"] = round(median(o.per_second / t.per_second for o, t in zip(ours, theirs, strict=True)), 3)
            row[f"{name}_cpu_ratio"] = round(median(t.cpu_us / o.cpu_us for o, t in zip(ours, theirs, strict=True)), 3)
    return row


async def hold(url: str, make: Callable[[], Made], concurrent: int) -> dict[str, Any]:
    """Open all connections at once; then hold as many requests at the server."""
    begun, most = descriptors(), 0
    send, client = make()
    started = time.perf_counter()
    await drive(send, concurrent, concurrent)
    connected = time.perf_counter() - started

    async def count() -> None:
        nonlocal most
        while True:
            most = max(most, descriptors() - begun)
            await asyncio.sleep(0.2)

    counting = asyncio.create_task(count())
    await ask(f"{url}/hold/{concurrent}")
    await drive(send, concurrent, concurrent)
    most = max(most, descriptors() - begun)
    counting.cancel()
    peak = (await ask(f"{url}/stats"))["peak"]
    await client.close()
    return {"connected_seconds": round(connected, 2), "peak": peak, "peak_share": round(peak / concurrent, 4), "descriptors": most}


def open_files() -> int:
    """Raise this process's limit to what it may be; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else soft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=list(PATHS), default="vllm")
    parser.add_argument("--prompt", type=int, default=64, help="ids of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="ids of the answer (256 at most)")
    parser.add_argument("--requests", type=int, default=16384, help="per round, and C at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrent", type=int, nargs="*", default=list(CONCURRENCIES))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    limit = open_files()
    if options.serve:
        asyncio.run(serve(options.kind, options.tokens))
        return
    row: dict[str, Any] = {"benchmark": "client", "kind": options.kind, "prompt": options.prompt, "tokens": options.tokens}
    row |= {"python": platform.python_version(), "aiohttp": aiohttp.__version__, "open_files": limit}
    same = ["--serve", "--kind", options.kind, "--tokens", str(options.tokens)]
    with subprocess.Popen([sys.executable, __file__, *same], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None  # noqa: S101
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            for concurrent in options.concurrent:
                if concurrent + 200 > limit:
                    row[str(concurrent)] = f"needs more than {limit} open files"
                    continue
                row[str(concurrent)] = asyncio.run(measure(url, options, concurrent))
        finally:
            server.kill()
    print(json.dumps(row))


if __name__ == "__main__":
    main()
