"""What the path from prompt to sink costs: a rollout through headway's flow beside a bare asyncio task of the same shape.

    python benchmarks/dispatch.py [--loop asyncio|uvloop] [--collector default|rare] [case ...]

Cases: null, paced, bytes, tokens; default: all. `--collector rare`: Python's garbage collector looks at young objects every 20,000
allocations instead of every 700, for both sides: with thousands of tasks alive it is a good part of the cost.

The orchestrator that ships runs on a real event loop with a null worker at the `Worker` seam (no engine, no environment: an attempt is one
`asyncio.sleep`), a trainer that takes no time and a batch store that writes nothing. The bare twin starts the same groups of the same
attempts as plain tasks and keeps as many in flight. Both run in turn, in one process per case; figures are medians over the repeats, ratios
are within the run. One JSON line per case.

  null    attempts just long enough to keep `concurrent` in flight (concurrent / 40,000 s), so that the CPU is the limit: rollouts/s, CPU us
          per rollout (process time, all threads) and over the bare task, finish-to-sink latency
  paced   attempts of .1-1 s, 8192 in flight: mean in flight against the bare tasks, finish-to-sink p99
  bytes   memory per rollout in flight (tracemalloc), with and without headway
  tokens  2048 in flight, 32k tokens each, payloads into the journal on disk: resident memory, loop lag, GB/s
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from null_world import ForgetfulJournal, NullStore, NullTrainer, NullWorker

from headway.adapters.journal.sqlite import SqliteJournal
from headway.formats.rollout import encode_samples
from headway.orchestrator import Orchestrator, Parts, Sections
from headway.settings import EnvironmentSection, MetricsSection, RolloutSection, RunSection
from headway.sim.engine import SimEngine
from headway.sim.journal import SimJournal
from headway.sim.prompts import ListPrompts
from headway.types import AttemptRequest, Checkpoint, Sample

GROUP_SIZE = 8
REPEATS = 3


@dataclass(frozen=True)
class Measured:
    """One pass: `rollouts` in `wall` seconds; latencies in seconds from a group's last finish to the sink."""

    rollouts: int
    wall: float
    cpu: float
    mean_in_flight: float
    latencies: list[float]


async def through_headway(worker: NullWorker, concurrent: int, rollouts: int, journal: SimJournal | SqliteJournal) -> Measured:
    """Run about `rollouts` rollouts through the orchestrator, `concurrent` at once: room for staleness is ample, max_concurrent binds."""
    groups_per_batch = max(1, concurrent // GROUP_SIZE // 4)
    latencies: list[float] = []

    def sink_sees(rewards: np.ndarray) -> np.ndarray:
        latencies.append(time.perf_counter() - worker.finished.pop(int(rewards[0])))
        return np.where(np.arange(len(rewards)) % 2 == 0, 1.0, -1.0)

    parts = Parts(
        prompts=ListPrompts(1000, shuffle=False),
        worker=worker,
        engines=[SimEngine("engine-0", label="null-0")],
        trainer=NullTrainer(),
        store=NullStore(),
        journal=journal,
        exporters=[],
        first=Checkpoint(0, "null-0", ""),
        advantages=sink_sees,
    )
    orchestrator = Orchestrator(
        parts,
        Sections(
            run=RunSection(steps=10**9),
            rollout=RolloutSection(
                groups_per_batch=groups_per_batch,
                group_size=GROUP_SIZE,
                max_concurrent=concurrent,
                max_staleness=64,
                steps_ahead=64,
                timeout_seconds=3600.0,
                on_stale="train",
            ),
            environment=EnvironmentSection(entry="null:null"),
            evaluation=None,
            metrics=MetricsSection(),
        ),
    )

    async def stop() -> None:
        while orchestrator.ledger.admitted * GROUP_SIZE < rollouts:  # noqa: ASYNC110 -- a condition of ours would cost the path
            await asyncio.sleep(0.02)

    run = asyncio.create_task(orchestrator.run())
    wall, cpu = time.perf_counter(), time.process_time()
    worker.area, worker.since = 0.0, wall
    await asyncio.wait([asyncio.create_task(stop()), run], return_when=asyncio.FIRST_COMPLETED)
    worker.moved(0)
    mean = worker.area / (time.perf_counter() - wall)  # without the drain
    orchestrator.drain("measured")
    await run
    ended = orchestrator.ledger.admitted * GROUP_SIZE
    return Measured(ended, time.perf_counter() - wall, time.process_time() - cpu, mean, latencies)


async def as_bare_tasks(worker: NullWorker, concurrent: int, rollouts: int) -> Measured:
    """Start the same groups as plain tasks, `concurrent` rollouts at once."""
    prompts = aiter(ListPrompts(1000, shuffle=False))
    free = asyncio.Event()
    running = 0
    requests = [AttemptRequest(0, 0, 0, await anext(prompts), "train", "engine-0", 0, None, 0)]  # type: ignore[arg-type]

    async def group() -> None:
        nonlocal running
        members = [tasks.create_task(worker.attempt(requests[0])) for _ in range(GROUP_SIZE)]
        for member in members:
            await member
        running -= GROUP_SIZE
        free.set()

    wall, cpu = time.perf_counter(), time.process_time()
    worker.area, worker.since = 0.0, wall
    mean = 0.0
    async with asyncio.TaskGroup() as tasks:
        for _ in range(rollouts // GROUP_SIZE):
            while running + GROUP_SIZE > concurrent:
                free.clear()
                await free.wait()
            running += GROUP_SIZE
            tasks.create_task(group())
        worker.moved(0)
        mean = worker.area / (time.perf_counter() - wall)
    return Measured(rollouts // GROUP_SIZE * GROUP_SIZE, time.perf_counter() - wall, time.process_time() - cpu, mean, [])


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(passes: Sequence[Measured], of: Callable[[Measured], float]) -> float:
    return statistics.median(of(one) for one in passes)


def cpu_us(one: Measured) -> float:
    return 1e6 * one.cpu / one.rollouts


def paced(seed: int) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: rng.uniform(0.1, 1.0)


def open_journal(kind: str, directory: str) -> SimJournal | SqliteJournal:
    return ForgetfulJournal() if kind == "memory" else SqliteJournal(Path(tempfile.mkdtemp(dir=directory)), run_id="bench")


async def compare(concurrent: int, rollouts: int, kind: str, pace: Callable[[int], Callable[[], float]]) -> dict[str, object]:
    ours, bare = [], []
    with tempfile.TemporaryDirectory() as directory:
        for repeat in range(REPEATS):
            gc.collect()
            bare.append(await as_bare_tasks(NullWorker(pace(repeat)), concurrent, rollouts))
            gc.collect()
            journal = open_journal(kind, directory)
            ours.append(await through_headway(NullWorker(pace(repeat)), concurrent, rollouts, journal))
            await journal.close()
    return {
        "concurrent": concurrent,
        "group_size": GROUP_SIZE,
        "journal": kind,
        "rollouts": int(median(ours, lambda one: one.rollouts)),
        "rollouts_per_second": round(median(ours, lambda one: one.rollouts / one.wall)),
        "bare_rollouts_per_second": round(median(bare, lambda one: one.rollouts / one.wall)),
        "cpu_us_per_rollout": round(median(ours, cpu_us), 1),
        "bare_cpu_us_per_rollout": round(median(bare, cpu_us), 1),
        "cpu_us_over_bare": round(statistics.median(cpu_us(o) - cpu_us(b) for o, b in zip(ours, bare, strict=True)), 1),
        "mean_in_flight": round(median(ours, lambda one: one.mean_in_flight), 1),
        "in_flight_ratio": round(statistics.median(o.mean_in_flight / b.mean_in_flight for o, b in zip(ours, bare, strict=True)), 3),
        "finish_to_sink_p50_ms": round(1e3 * median(ours, lambda one: quantile(one.latencies, 0.5)), 3),
        "finish_to_sink_p99_ms": round(1e3 * median(ours, lambda one: quantile(one.latencies, 0.99)), 3),
    }


async def case_null(concurrent: int, kind: str) -> dict[str, object]:
    return await compare(concurrent, max(20_000, 4 * concurrent), kind, lambda _: lambda: concurrent / 40_000)


async def case_paced(concurrent: int, kind: str) -> dict[str, object]:
    return await compare(concurrent, 12 * concurrent, kind, paced)


async def case_bytes(concurrent: int, kind: str) -> dict[str, object]:
    async def held(start: Callable[[NullWorker], Awaitable[Measured]]) -> float:
        worker = NullWorker(lambda: 0.0, gate=(gate := asyncio.Event()))
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        task = asyncio.ensure_future(start(worker))
        while worker.in_flight < concurrent:  # noqa: ASYNC110 -- nobody tells
            await asyncio.sleep(0.01)
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
        gate.set()
        await task
        return used / concurrent

    tracemalloc.start()
    bare = await held(lambda worker: as_bare_tasks(worker, concurrent, 2 * concurrent))
    ours = await held(lambda worker: through_headway(worker, concurrent, concurrent, ForgetfulJournal()))
    tracemalloc.stop()
    return {"concurrent": concurrent, "journal": kind, "bytes_per_rollout_in_flight": round(ours), "bare_bytes_per_rollout": round(bare)}


async def case_tokens(concurrent: int, kind: str) -> dict[str, object]:
    tokens = 32_768
    payload = encode_samples([one_sample(tokens)])
    lags: list[float] = []

    async def tick() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.005
            await asyncio.sleep(0.005)
            lags.append(loop.time() - due)

    before = resident_bytes()
    ticker = asyncio.create_task(tick())
    with tempfile.TemporaryDirectory() as directory:
        journal = open_journal(kind, directory)
        measured = await through_headway(NullWorker(lambda: 0.0 + next(spread), payload, fresh=True), concurrent, 3 * concurrent, journal)
        await journal.close()
    ticker.cancel()
    with suppress(asyncio.CancelledError):
        await ticker
    return {
        "concurrent": concurrent,
        "tokens": tokens,
        "journal": kind,
        "rollouts": measured.rollouts,
        "payload_bytes": len(payload),
        "gigabytes_per_second": round(measured.rollouts * len(payload) / measured.wall / 1e9, 3),
        "rollouts_per_second": round(measured.rollouts / measured.wall),
        "resident_megabytes_before": round(before / 1e6),
        "resident_megabytes_peak": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6),
        "loop_lag_p50_ms": round(1e3 * quantile(lags, 0.5), 3),
        "loop_lag_p99_ms": round(1e3 * quantile(lags, 0.99), 3),
        "loop_lag_max_ms": round(1e3 * max(lags), 3),
    }


spread = itertools.cycle([random.Random(0).uniform(0.5, 3.0) for _ in range(4096)])


def one_sample(tokens: int) -> Sample:
    sampled = np.ones(tokens, np.bool_)
    sampled[:64] = False
    rng = np.random.default_rng(0)
    return Sample(
        token_ids=rng.integers(0, 150_000, tokens, np.int32),
        sampled_mask=sampled,
        loss_mask=sampled,
        logprobs=np.where(sampled, -rng.random(tokens, np.float32), np.float32(0)),
        span_start=np.array([0], np.int32),
        span_version=np.array([0], np.int32),
    )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


CASES: dict[str, list[tuple[Callable[[int, str], Coroutine[Any, Any, dict[str, object]]], int, str]]] = {
    "null": [(case_null, concurrent, kind) for concurrent in (64, 1024, 8192) for kind in ("memory", "disk")],
    "paced": [(case_paced, 8192, "memory"), (case_paced, 8192, "disk")],
    "bytes": [(case_bytes, 8192, "memory")],
    "tokens": [(case_tokens, 2048, "memory"), (case_tokens, 2048, "disk")],
}


COLLECTORS = {"default": gc.get_threshold(), "rare": (20_000, 50, 100)}


def run_case(name: str, index: int, loop: str, collector: str) -> None:
    """Run one case in this process and print its line."""
    gc.set_threshold(*COLLECTORS[collector])
    factory = None
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    case, concurrent, kind = CASES[name][index]
    with asyncio.Runner(loop_factory=factory) as runner:
        row = runner.run(case(concurrent, kind))
    setting = {"benchmark": "dispatch", "case": name, "loop": loop, "collector": collector, "python": platform.python_version()}
    print(json.dumps({**setting, **row}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="case", help=", ".join(CASES))
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    parser.add_argument("--collector", choices=list(COLLECTORS), default="default")
    parser.add_argument("--index", type=int, help="run only the case's line of this number, in this process")
    options = parser.parse_args()
    for name in options.cases:
        if options.index is not None:
            run_case(name, options.index, options.loop, options.collector)
            continue
        for index in range(len(CASES[name])):
            same = ["--loop", options.loop, "--collector", options.collector, "--index", str(index)]
            subprocess.run([sys.executable, __file__, name, *same], check=True)


if __name__ == "__main__":
    main()
