"""Fake engines of both kinds with their administrative clients, checkpoints for them, and generations that are in flight meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from held_ports import held_ports
from safetensors.numpy import save_file

from headway.adapters.engines import admin_of
from headway.adapters.engines.http import HttpPool
from headway.formats.probe import Probe, write_probe
from headway.settings import EngineSection
from headway.testing import EngineScript, FakeEngine, Reply, Rule
from headway.types import Checkpoint, EngineAddress, SamplingParams

KINDS = ("vllm", "sglang")
MODES: dict[str, Any] = {
    "recompute": {"weight_sync": "in_flight"},
    "keep": {"weight_sync": "in_flight", "recompute_kv": False},
    "abort": {"weight_sync": "abort_resume"},
    "wait": {"weight_sync": "wait"},
}
LOADS = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}
PROMPT = [10, 11, 12, 13, 14, 15, 16, 17, 18]


def checkpoint(directory: Path, version: int, *, probe: bool = True, **tensors) -> Checkpoint:
    path = directory / f"{version}"
    path.mkdir()
    numbers: dict[str, Any] = {"version": np.array([version], np.int64), "weight": np.full((2, 3), version, np.float32)}
    save_file(numbers | tensors, path / "model.safetensors")
    (path / "manifest.json").write_text("{}")
    if probe:
        chances = np.random.default_rng(version).dirichlet(np.ones(100))
        write_probe(path, Probe(tuple(range(3, 12)), np.log(chances).astype(np.float32)))
    return Checkpoint(version, f"abc-{version}", str(path))


@asynccontextmanager
async def served(kind, *rules, default=None, script=EngineScript(), sampling=SamplingParams(), model="", **settings):  # noqa: B008
    """An engine of a kind, at a port that is its own when it is down as well, and its administrative client."""
    speaking = msgspec.structs.replace(script, speaks=kind)
    with held_ports() as port:
        async with FakeEngine(rules, script=speaking, default=default, port=port) as server:
            section = EngineSection(**{"request_timeout_seconds": 60.0, **settings})
            admin = admin_of("engine-0", EngineAddress(server.url, kind), section, sampling=sampling, model=model)
            yield server, admin
            await admin.close()


async def sync(admin, weights: Checkpoint) -> None:
    await admin.prepare(weights)
    await admin.transfer(weights)
    await admin.commit(weights)


async def generate(server: FakeEngine, kind: str, tokens: int) -> None:
    http = HttpPool()
    body: dict[str, Any]
    if kind == "vllm":
        body = {"request_id": "train-1-0-0-1", "token_ids": PROMPT, "sampling_params": {"max_tokens": tokens, "logprobs": 0}}
        await http.request("POST", server.url + "/inference/v1/generate", msgspec.json.encode(body))
    else:
        body = {"rid": "train-1-0-0-1", "input_ids": PROMPT, "sampling_params": {"max_new_tokens": tokens}, "return_logprob": True}
        await http.request("POST", server.url + "/generate", msgspec.json.encode(body))
    await http.close()


LONG = 4000  # tokens: more than are ever written


@asynccontextmanager
async def in_flight(server: FakeEngine, kind: str):
    """A generation that has written a few tokens and goes on as long as the block does, or until `end_soon`, which it yields."""
    running = asyncio.create_task(generate(server, kind, LONG))
    while not any(generation.written.ids for generation in server._live):  # nobody tells of a single token
        assert not running.done()
        await asyncio.sleep(0.002)

    def end_soon():
        for generation in server._live:
            del generation._ids[len(generation.written.ids) + 3 :]

    yield end_soon
    end_soon()
    await running


SLOW = Rule(match={"purpose": "train"}, do=Reply(tokens=LONG, token_seconds=0.01))
