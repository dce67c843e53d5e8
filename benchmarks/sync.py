"""From a published version to the engine that serves it, by each way that weights can go; and what a sync costs in tokens. One JSON line.

`ways`: seconds from the rename of `weights/<v>` to the end of the commit (found and hashed, prepared, loaded, verified), the median of
`--repeats`; beside it the seconds that reading the same bytes once takes in the same run (`read_once` with the page cache dropped where the
system does so, `read_cached` from it: a version that was just written lies in the cache), and `ratio`, publish to serve over `read_once` of
the complete file. `offer`: what making the offer takes the trainer.

`modes`: a sync under 16 requests in flight. `recomputed_tokens`: put into the cache again; `lost_tokens`: sampled and not delivered;
`straddling`: requests with tokens of both versions; `pause`: from prepare to commit.

Against headway's own engine in a process of its own, or any server: `--url http://127.0.0.1:8000 --model DIRECTORY` (what it serves).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from sync_versions import LINEAGE, Versions, make_model, read_seconds
from transformers.utils import logging as transformers_logging

from headway.adapters.engines import admin_of
from headway.adapters.engines.client import EngineClient, Generated
from headway.adapters.trainers.directory import DirectoryTrainer
from headway.settings import EngineSection
from headway.types import Checkpoint, EngineAddress, SamplingParams

IN_FLIGHT, PROMPT, NEW = 16, 32, 64
_WARM_UP = 2  # syncs: by the first the base becomes known, by the second its hashes
MODES: dict[str, dict[str, Any]] = {
    "in_flight, recompute_kv": {"weight_sync": "in_flight"},
    "in_flight, stale cache": {"weight_sync": "in_flight", "recompute_kv": False},
    "abort_resume": {"weight_sync": "abort_resume"},
    "wait": {"weight_sync": "wait"},
}
SERVE = (
    "import sys; from pathlib import Path; from headway.embedded.engine import EngineServerSettings, serve; "
    "serve(EngineServerSettings(model=Path(sys.argv[1]), device='cpu', threads=1, label='bench-0'))"
)


@contextmanager
def served(directory: Path) -> Iterator[str]:
    with subprocess.Popen([sys.executable, "-c", SERVE, str(directory)], stdout=subprocess.PIPE, text=True) as server:
        try:
            yield next(iter(server.stdout or ())).split()[-1]
        finally:
            server.terminate()


class Bench:
    """One engine, the versions it is given, and a clock."""

    def __init__(self, url: str, versions: Versions) -> None:
        self.address = EngineAddress(url, "vllm")
        self.versions = versions
        self.trainer = DirectoryTrainer(versions.run, LINEAGE, 0.001, lambda: None)

    def admin(self, **settings: Any) -> Any:
        return admin_of("engine-0", self.address, EngineSection(**settings))

    async def sync(self, admin: Any, version: int, *, since: float) -> dict[str, float]:
        """Bring a version that was published; seconds of each step, and of all."""
        checkpoint = await self.trainer.checkpoint(version - 1)
        times = [since, time.perf_counter()]
        for step in (admin.prepare, admin.transfer, admin.commit):
            await step(checkpoint)
            times.append(time.perf_counter())
        names = ("found_seconds", "prepare_seconds", "transfer_seconds", "commit_seconds")
        steps = {name: after - before for name, before, after in zip(names, times, times[1:], strict=False)}
        return steps | {"publish_to_serve_seconds": times[-1] - since}

    async def way(self, wanted: str, publish: Any, repeats: int) -> dict[str, Any]:
        """Measure one way, each time from a base that went the same way before."""
        admin = self.admin(weight_transfer=wanted)
        rows, offers = [], []
        try:
            for repeat in range(repeats + _WARM_UP):
                version = publish()
                row = await self.sync(admin, version, since=time.perf_counter())
                file = self.versions.run.weight(version) / "model.safetensors"
                row |= {"read_once_seconds": read_seconds(file, cached=False), "read_cached_seconds": read_seconds(file, cached=True)}
                if repeat >= _WARM_UP:
                    rows.append(row)
                    offers.append(self.versions.seconds)
        finally:
            await admin.close()
        figures = {name: round(median(row[name] for row in rows), 4) for name in rows[0]}
        ratio = figures["publish_to_serve_seconds"] / max(figures["read_once_seconds"], 1e-9)
        return figures | {"ratio": round(ratio, 2), "offer_seconds": round(median(offers), 4), "bytes": self.carried(wanted, version)}

    def carried(self, wanted: str, version: int) -> int:
        directory = self.versions.run.delta(version) if wanted == "delta" else self.versions.run.weight(version)
        return (directory / "model.safetensors").stat().st_size

    async def mode(self, settings: dict[str, Any]) -> dict[str, Any]:
        """One sync under requests in flight, once half of the tokens are there."""
        admin, client = self.admin(**settings), EngineClient(LINEAGE)
        try:
            await self.sync(admin, self.versions.full(), since=time.perf_counter())
            version = self.versions.full()
            before = await self.counters()
            requests = [asyncio.create_task(self.generate(client, number)) for number in range(IN_FLIGHT)]
            half = before["generation_tokens_total"] + IN_FLIGHT * NEW // 2
            while (await self.counters())["generation_tokens_total"] < half:  # noqa: ASYNC110  (another process counts)
                await asyncio.sleep(0.02)
            row = await self.sync(admin, version, since=time.perf_counter())
            answers = await asyncio.gather(*requests)
            after = await self.counters()
        finally:
            await client.close()
            await admin.close()
        return tokens_of(answers, before, after, settings) | {
            "pause_seconds": round(row["prepare_seconds"] + row["transfer_seconds"] + row["commit_seconds"], 3)
        }

    async def generate(self, client: EngineClient, number: int) -> Generated:
        prompt = [3 + (number * 37 + place * 11) % 1000 for place in range(PROMPT)]
        return await client.generate(
            self.address, prompt, SamplingParams(), seed=number, max_tokens=NEW, request_id=f"sync-{os.getpid()}-{number}-{time.time_ns()}"
        )

    async def counters(self) -> dict[str, float]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.address.url}/metrics") as response:
            text = await response.text()
        names = ("generation_tokens_total", "prompt_tokens_total")
        lines = [line.split() for line in text.splitlines()]
        return {name: sum(float(line[1]) for line in lines if line and line[0].startswith(f"vllm:{name}{{")) for name in names}


def tokens_of(answers: list[Generated], before: dict[str, float], after: dict[str, float], settings: dict[str, Any]) -> dict[str, Any]:
    """What a sync cost. Contexts that were cut in two are known by their spans: what lies before the second is cached again."""
    delivered = sum(len(answer.token_ids) for answer in answers)
    switches = [answer.spans[1][0] for answer in answers if len(answer.spans) > 1]
    recomputed = 0
    if settings["weight_sync"] == "in_flight" and settings.get("recompute_kv", True):
        recomputed = sum(PROMPT + switch for switch in switches)
    elif settings["weight_sync"] == "abort_resume":
        recomputed = round(after["prompt_tokens_total"] - before["prompt_tokens_total"]) - PROMPT * len(answers)
    sampled = round(after["generation_tokens_total"] - before["generation_tokens_total"])
    return {"recomputed_tokens": recomputed, "lost_tokens": sampled - delivered, "straddling": len(switches), "delivered_tokens": delivered}


async def measure(bench: Bench, repeats: int) -> dict[str, Any]:
    versions = bench.versions
    first = versions.run.weight(versions.first())
    admin = bench.admin()
    await admin.prepare(at_start := Checkpoint(0, f"{LINEAGE}-0", str(first)))
    await admin.transfer(at_start)
    await admin.commit(at_start)
    await admin.close()
    ways = {
        "directory": await bench.way("directory", versions.full, repeats),
        "delta, 10 % changed": await bench.way("delta", lambda: versions.delta(0.1), repeats),
        "delta, 100 % changed": await bench.way("delta", lambda: versions.delta(1.0), repeats),
        "memory": await bench.way("memory", versions.in_memory, repeats),
    }
    return {"ways": ways, "modes": {name: await bench.mode(settings) for name, settings in MODES.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--url", default="", help="a running engine; it must read the files that are written here")
    parser.add_argument("--model", type=Path, help="the checkpoint that it serves")
    chosen = parser.parse_args()
    transformers_logging.disable_progress_bar()
    logging.getLogger("headway").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        model = chosen.model or Path(name) / "model"
        if chosen.model is None:
            make_model(model)
        versions = Versions(Path(name) / "run", model)
        try:
            with nullcontext(chosen.url) if chosen.url else served(model) as url:
                measured = asyncio.run(measure(Bench(url, versions), chosen.repeats))
        finally:
            versions.close()
    shape = {"whole_bytes": versions.whole_bytes, "in_flight": IN_FLIGHT, "prompt_tokens": PROMPT, "new_tokens": NEW}
    print(json.dumps({"benchmark": "sync", "engine": chosen.url or "embedded", **shape, **measured}))


if __name__ == "__main__":
    main()
