"""Requests per second of `EngineClient` beside a bare aiohttp loop, at a null HTTP server in a process of its own; one JSON line.

Per concurrency C = 64 / 1024 / 8192: C tasks send requests one after the other, `--rounds` times in turn with each client (the best round
counts, CPU time of this process included). The bare loop posts a body made beforehand and reads the answer; ours encodes each request and
decodes and checks each answer (`--prompt` ids, `--tokens` of them back). `ratio` is ours by bare, of requests per second. Then the server
holds all answers until C requests are in (or for 30 s): `peak` is how many were. `descriptors` are those of this process meanwhile, above
those it began with: bounded by a connection per request in flight.
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
from typing import Any, NamedTuple

import aiohttp

from headway.adapters.engines.client import EngineClient
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


def bare_client(url: str, kind: str, prompt: list[int]) -> tuple[Send, aiohttp.ClientSession]:
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
    sampling = {"max_tokens": 256, "temperature": 1.0, "seed": 1, "logprobs": 0}
    body = json.dumps({"request_id": "train-1-2-3-4-abcdef", "token_ids": prompt, "sampling_params": sampling, "stream": False}).encode()
    address = url + PATHS[kind]

    async def send() -> object:
        async with session.post(address, data=body, headers={"Content-Type": "application/json"}) as response:
            return await response.read()

    return send, session


def our_client(url: str, kind: EngineKind, prompt: list[int]) -> tuple[Send, EngineClient]:
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
    requests = max(options.requests, 2 * concurrent)
    rounds: dict[str, list[Measured]] = {"bare": [], "ours": []}
    for _ in range(options.rounds):
        for name, measured in rounds.items():
            send, client = bare_client(url, options.kind, prompt) if name == "bare" else our_client(url, options.kind, prompt)
            await drive(send, concurrent, concurrent)  # connections are there
            measured.append(await drive(send, concurrent, requests))
            await client.close()
    begun = descriptors()
    send, client = our_client(url, options.kind, prompt)
    await send()  # versions are named
    await ask(f"{url}/hold/{concurrent}")
    most = 0

    async def count() -> None:
        nonlocal most
        while True:
            most = max(most, descriptors() - begun)
            await asyncio.sleep(0.2)

    counting = asyncio.create_task(count())
    await drive(send, concurrent, concurrent)
    most = max(most, descriptors() - begun)
    counting.cancel()
    peak = (await ask(f"{url}/stats"))["peak"]
    await client.close()
    best = {name: max(each) for name, each in rounds.items()}
    return {
        "requests": requests,
        "per_second": round(best["ours"].per_second),
        "bare_per_second": round(best["bare"].per_second),
        "ratio": round(best["ours"].per_second / best["bare"].per_second, 3),
        "cpu_us": round(min(each.cpu_us for each in rounds["ours"]), 1),
        "bare_cpu_us": round(min(each.cpu_us for each in rounds["bare"]), 1),
        "peak": peak,
        "peak_share": round(peak / concurrent, 4),
        "descriptors": most,
    }


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
    parser.add_argument("--requests", type=int, default=16384, help="per round, and twice C at least")
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
