"""Requests per second of `EngineClient` beside a bare aiohttp loop, at a null HTTP server in a process of its own; one JSON line.

Per concurrency C = 64 / 1024 / 8192: C tasks send requests one after the other, `--rounds` times in turn with each client. `bare` posts a
body made beforehand and reads the answer; `bare_json` encodes each request and decodes each answer (`--prompt` ids, `--tokens` of them
back) by msgspec, and checks nothing; both open connections as ours does, since thousands at once overrun the server. `ours` is the
product's client, used as rollout workers use it.

Each round begins with C requests that the server holds until all are in: `connected_seconds` after the round began each task has its
first answer and its connection. They go on without a pause, and the next `--requests` answers count (C at least): no client opens
connections meanwhile, none of its connections is idle, and C requests are in flight at the first of them and at the last. `peak_share`:
which part of C was held at once, in the worst round; `descriptors`: those of this process then, above those it began with: bounded by a
connection per request in flight.

Medians over the rounds count. `_ratio` is ours by theirs, of requests per second, round by round; `_cpu_ratio` theirs by ours, of this
process's CPU time per request, which a slow server, or what else the machine does, hides less.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
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
from null_server import PATHS, serve

from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.connecting import PatientConnector
from headway.adapters.engines.generation import Ask
from headway.adapters.engines.in_flight import InFlight
from headway.adapters.engines.sglang import wire as sglang
from headway.adapters.engines.vllm import wire as vllm
from headway.types import EngineAddress, EngineKind, SamplingParams

CONCURRENCIES = (64, 1024, 8192)

Send = Callable[[], Awaitable[object]]


class Client(Protocol):
    """Either client, once it is done with."""

    async def close(self) -> None: ...


Made = tuple[Send, Client]


class Round(NamedTuple):
    per_second: float
    cpu_us: float
    connected_seconds: float
    descriptors: int


async def drive(send: Send, concurrent: int, requests: int) -> Round:
    """Let `concurrent` tasks send requests until each has had an answer, and `requests` more have come."""
    unanswered, left = concurrent, requests
    descriptors = 0
    began = wall = cpu = connected = 0.0

    async def work() -> None:
        nonlocal unanswered, left, descriptors, wall, cpu, connected
        await send()
        unanswered -= 1
        if not unanswered:
            descriptors = open_descriptors()
            connected = time.perf_counter() - began
            wall, cpu = time.perf_counter(), time.process_time()
        while left > 0:
            await send()
            if not unanswered:
                left -= 1
                if not left:
                    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrent)))
    return Round(requests / wall, cpu / requests * 1e6, connected, descriptors)


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
        asked = wire.encode_request(Ask(f"train-1-2-3-{number}", prompt, 256, 1.0, 1.0, 0, number))
        async with session.post(address, data=asked, headers=headers) as response:
            return decode(await response.read())

    return send_json if json_too else send, session


def our_client(url: str, kind: EngineKind, prompt: list[int]) -> Made:
    client, engine, sampling, numbers = EngineClient("null"), EngineAddress(url, kind), SamplingParams(), itertools.count()
    in_flight = InFlight()

    async def send() -> object:
        number = next(numbers)
        name = f"train-1-2-3-{number}"
        return await client.generate(engine, prompt, sampling, seed=number, max_tokens=256, request_id=name, in_flight=in_flight)

    return send, client


async def ask(url: str) -> dict[str, int]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        found: dict[str, int] = await response.json()
        return found


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- names, not paths


async def measure(url: str, options: argparse.Namespace, concurrent: int) -> dict[str, Any]:
    prompt = list(range(1000, 1000 + options.prompt))
    requests = max(options.requests, concurrent)
    clients: dict[str, Callable[[], Made]] = {
        "ours": lambda: our_client(url, options.kind, prompt),
        "bare_json": lambda: bare_client(url, options.kind, prompt, json_too=True),
        "bare": lambda: bare_client(url, options.kind, prompt),
    }
    clients = {name: make for name, make in clients.items() if name == "ours" or name in options.against}
    begun, peak = open_descriptors(), concurrent
    rounds: dict[str, list[Round]] = {name: [] for name in clients}
    for number in range(options.rounds):
        for name in list(clients)[:: 1 if number % 2 else -1]:
            send, client = clients[name]()
            await ask(f"{url}/hold/{concurrent}")
            gc.collect()  # what the round before has left is none of this one's
            rounds[name].append(await drive(send, concurrent, requests))
            await client.close()
            if name == "ours":
                peak = min(peak, (await ask(f"{url}/stats"))["peak"])
    ours = rounds["ours"]
    row: dict[str, Any] = {"requests": requests, "peak_share": round(peak / concurrent, 4)}
    row["descriptors"] = max(each.descriptors for each in ours) - begun
    for name, theirs in rounds.items():
        row[f"{name}_connected_seconds"] = round(median(each.connected_seconds for each in theirs), 2)
        row[f"{name}_per_second"] = round(median(each.per_second for each in theirs))
        row[f"{name}_cpu_us"] = round(median(each.cpu_us for each in theirs), 1)
        if name != "ours":
            row[f"{name}_ratio"] = round(median(o.per_second / t.per_second for o, t in zip(ours, theirs, strict=True)), 3)
            row[f"{name}_cpu_ratio"] = round(median(t.cpu_us / o.cpu_us for o, t in zip(ours, theirs, strict=True)), 3)
    return row


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
    parser.add_argument("--requests", type=int, default=4096, help="per round, and C at least")
    parser.add_argument("--rounds", type=int, default=5, help="many short ones, in turn: what else the machine does meets all clients")
    parser.add_argument("--against", nargs="*", choices=["bare_json", "bare"], default=["bare_json", "bare"])
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
