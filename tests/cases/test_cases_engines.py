"""Fault cases of engines, over real HTTP: administrative calls that fail, hang or are refused, and engines that are always busy."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headway.adapters.engines import admin_of
from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.generation import GenerationFailed
from headway.errors import EngineFailed
from headway.events import BatchFormed, Published
from headway.flow.engine_pool import EnginePool
from headway.flow.engine_probe import EngineProbe
from headway.flow.recorder import Recorder
from headway.flow.runner import RolloutRunner
from headway.flow.watcher import WeightWatcher
from headway.protocols import Mover
from headway.settings import EngineSection
from headway.sim.journal import SimJournal
from headway.testing import EngineScript, FakeEngine, Reply, Rule
from headway.types import AttemptRequest, Checkpoint, EngineAddress, EngineKind, Failure, Prompt, SamplingParams

KINDS: tuple[EngineKind, ...] = ("vllm", "sglang")
PAUSES: dict[str, str] = {"vllm": "/pause", "sglang": "/pause_generation"}
LOADS: dict[str, str] = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}
RESUMES: dict[str, str] = {"vllm": "/resume", "sglang": "/continue_generation"}
FAULTS = {"503": Reply(status=503, text="busy"), "reset": Reply(cut=True), "timeout": Reply(hang=True)}
CALLS = {
    "vllm": ("/pause", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/resume", "/weight_info"),
    "sglang": ("/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation", "/model_info"),
}
FAILING = [
    (kind, call, fault)
    for kind, calls in CALLS.items()
    for call in calls
    for fault in FAULTS
    if (kind, fault) != ("sglang", "timeout") or call == LOADS[kind]  # an engine that hangs is looked at after seconds
]
NO_MEMORY = Reply(status=500, text="no memory")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Fleet:
    """Real clients of fake engines, the watcher that gives them weights, and a trainer that has just made version 1."""

    def __init__(
        self, servers: list[FakeEngine], directory: Path, *, lost_timeout_seconds: float = 60.0, request_timeout_seconds: float = 60.0
    ) -> None:
        settings = EngineSection(request_timeout_seconds=request_timeout_seconds, recompute_kv=False)
        self.servers = servers
        self.clients = [admin_of(f"engine-{n}", EngineAddress(server.url, kind_of(server)), settings) for n, server in enumerate(servers)]
        self.recorder = Recorder(SimJournal())
        self.published: list[Published] = []
        self.directory = directory
        self.pool = EnginePool(self.clients, record=self.record, clock=time.time, lost_timeout_seconds=lost_timeout_seconds)
        self.watcher = WeightWatcher(
            trainer=self,  # type: ignore[arg-type]
            pool=self.pool,
            watch=self.recorder.watch,
            record=self.record,
            evaluation=None,
            steps=1,
            clock=time.time,
        )
        self.probe = EngineProbe(self.pool, take_up=self.watcher.take_up)

    def record(self, event: object) -> None:
        self.recorder.record(event)  # type: ignore[arg-type]
        if isinstance(event, Published):
            self.published.append(event)

    def weights(self, version: int) -> Checkpoint:
        directory = self.directory / f"{version}"
        directory.mkdir(exist_ok=True)
        tensors: dict[str, Any] = {"version": np.array([version], np.int64), "weight": np.full((2, 3), version, np.float32)}
        save_file(tensors, directory / "model.safetensors")
        return Checkpoint(version, f"abc-{version}", str(directory))

    async def checkpoint(self, after: int) -> Checkpoint:
        """The trainer's: version 1."""
        return self.weights(after + 1)

    async def serves(self, version: int, *, by: int, faults: Sequence[Rule] = ()) -> None:
        """Start with version 0; then the last engine has faults. Return once the version is published for so many engines."""
        await self.watcher.start(self.weights(0))
        self.servers[-1].rules = faults
        self.record(BatchFormed(0.0, 0, (), 0.0))
        services = [asyncio.create_task(each()) for each in (self.watcher.run, self.probe.run, self.pool.run)]
        try:
            async with asyncio.timeout(120):
                while not (self.recorder.watch.now.version == version and len(self.pool.serving) == by):
                    await asyncio.sleep(0.01)
                    for service in services:
                        if service.done():
                            service.result()
        finally:
            for service in services:
                service.cancel()
            for service in services:
                with suppress(asyncio.CancelledError, EngineFailed, ExceptionGroup):
                    await service
            await self.close()

    async def close(self) -> None:
        for client in self.clients:
            await client.close()


def kind_of(server: FakeEngine) -> EngineKind:
    return "sglang" if server.script.speaks == "sglang" else "vllm"


@asynccontextmanager
async def engines(count: int, kind: str, **more: str):
    """So many fake engines that speak one protocol."""
    async with AsyncExitStack() as stack:
        script = EngineScript(speaks=kind, **more)  # type: ignore[arg-type]
        yield [await stack.enter_async_context(FakeEngine(script=script)) for _ in range(count)]


def asked(server: FakeEngine, path: str) -> int:
    return sum(entry["path"] == path for entry in server.log.of("asked"))


@pytest.mark.parametrize(("kind", "call", "fault"), FAILING)
async def test_E03_the_first_two_of_a_call_fail_and_the_engine_ends_unpaused(tmp_path: Path, kind: str, call: str, fault: str) -> None:
    async with engines(1, kind) as [server]:
        fleet = Fleet([server], tmp_path, request_timeout_seconds=0.3)
        await fleet.serves(1, by=1, faults=[Rule(match={"path": call}, nth=(1, 2), do=FAULTS[fault])])
        assert (server.paused, server.weights.label) == (False, "abc-1")
        assert asked(server, call) >= 3


async def test_E03_a_call_that_fails_for_ever_ends_the_run_and_not_in_silence(tmp_path: Path, kind: str) -> None:
    async with engines(1, kind) as [server]:
        fleet = Fleet([server], tmp_path, lost_timeout_seconds=1.0)
        with pytest.raises(EngineFailed, match=rf"engine-0 was lost: .*{LOADS[kind]} failed: it answered 500: no memory"):
            await fleet.serves(1, by=1, faults=[Rule(match={"path": LOADS[kind]}, do=NO_MEMORY)])
        assert not server.paused


async def test_E02_E07_one_of_three_engines_refuses_a_load_and_is_gone_without(tmp_path: Path, kind: str) -> None:
    async with engines(3, kind) as [one, two, three]:
        fleet = Fleet([one, three, two], tmp_path)
        await fleet.serves(1, by=2, faults=[Rule(match={"path": LOADS[kind]}, do=NO_MEMORY)])
        assert fleet.published[-1].engines == ("engine-0", "engine-1")
        assert [server.weights.label for server in (one, two, three)] == ["abc-1", "unknown", "abc-1"], (
            "nobody takes half-loaded weights for a version"
        )
        assert [(await fleet.pool.acquire()).name for _ in range(4)] == ["engine-0", "engine-1"] * 2
        for server in (one, two, three):
            loads = [entry for entry in server.log.of("answered") if entry["path"] == LOADS[kind]]
            assert loads
            assert all(entry["paused"] for entry in loads), "paused before a load, however it ends"
            assert not server.paused, "and not after"


async def test_I06_one_of_four_engines_takes_a_load_call_and_never_answers(tmp_path: Path, kind: str) -> None:
    async with engines(4, kind) as servers:
        fleet = Fleet(servers, tmp_path, request_timeout_seconds=3.0)
        await fleet.serves(1, by=3, faults=[Rule(match={"path": LOADS[kind]}, do=Reply(hang=True))])
        assert fleet.published[-1].engines == ("engine-0", "engine-1", "engine-2")
        assert not any(server.paused for server in servers)


class Worker:
    """Attempts that are one generation each, as a rollout worker makes them."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.attempts = 0

    async def attempt(self, request: AttemptRequest, move: Mover | None = None) -> Failure:
        self.attempts += 1
        engine, name = EngineAddress(request.engine, request.kind), f"train-0-{request.member}-0-1"
        try:
            await self.client.generate(engine, [1, 2], request.sampling, seed=request.seed, max_tokens=4, request_id=name)
        except GenerationFailed as error:
            return Failure(error.cause, str(error), error.retryable)
        raise AssertionError("the engine was to fail")


@pytest.mark.parametrize(
    ("reply", "requests", "attempts"),
    [
        (Reply(status=503, text="busy"), 3, 1),  # by the client: once, and twice more; nobody multiplies it
        (Reply(cut=True), 3, 1),
        (Reply(status=500, text="internal"), 3, 3),  # by the attempts: rollout.max_attempts
        (Reply(status=422, text="not a number"), 1, 1),
        (Reply(status=404, text="<html>no such page</html>", content_type="text/html"), 1, 1),
    ],
    ids=["503", "reset", "500", "422", "404"],
)
async def test_I07_I11_a_request_is_tried_at_one_level_and_never_multiplied(
    tmp_path: Path, kind: str, reply: Reply, requests: int, attempts: int
) -> None:
    async with engines(1, kind) as [server]:
        fleet = Fleet([server], tmp_path)
        await fleet.watcher.start(fleet.weights(0))
        server.rules = [Rule(match={"purpose": "train"}, do=reply)]
        looking = asyncio.create_task(fleet.probe.run())
        worker = Worker(EngineClient("abc", retries=2))
        runner = RolloutRunner(
            attempt=worker.attempt,
            pool=fleet.pool,
            lost_since=fleet.probe.lost_since,
            sampling=SamplingParams(),
            run_seed=0,
            max_attempts=3,
        )
        ended = await asyncio.gather(*(runner.run(Prompt("p", 0, {}), group=0, member=member) for member in range(8)))
        looking.cancel()
        await worker.client.close()
        await fleet.close()
        sent = Counter(entry["path"] for entry in server.log.of("arrived"))
    route, completions = ("/generate" if kind == "sglang" else "/inference/v1/generate"), "/v1/completions"
    if kind == "vllm" and reply.status == 404:  # a server without the route: the other one is tried once, and whoever comes later knows
        assert 1 <= sent[route] <= 8
        assert sent[completions] == 8
    else:
        assert sent == {route: 8 * requests}
    assert worker.attempts == 8 * attempts
    assert all(isinstance(failure, Failure) and failure.cause == "engine_error" for failure in ended)
    if reply.text is not None:
        assert all(f"answered {reply.status}: {reply.text}" in failure.detail for failure in ended if isinstance(failure, Failure))


def at_work() -> float:
    """Seconds that this thread has run or waited for a processor: however busy the machine is, the rest of the time is its own choice."""
    with suppress(OSError):
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return (int(ran) + int(waited)) / 1e9
    return time.thread_time()


async def test_O06_backing_off_blocks_nobody(kind: str) -> None:
    """200 rollouts at an engine that is busy, then resets: the loop turns all the time."""
    lags: list[float] = []

    async def watch() -> None:
        while True:
            before, worked = time.perf_counter(), at_work()
            await asyncio.sleep(0.01)
            lags.append(time.perf_counter() - before - 0.01 - (at_work() - worked))

    replies = (Reply(status=503, text="busy"), Reply(cut=True), Reply(status=429, text="busy", headers={"Retry-After": "0.1"}))
    async with engines(1, kind, label="abc-0") as [server]:
        server.rules = [Rule(match={"member": list(range(place, 200, 3))}, do=reply) for place, reply in enumerate(replies)]
        client, watching = EngineClient("abc", retries=2), asyncio.create_task(watch())

        async def generate(number: int) -> None:
            engine, name = EngineAddress(server.url, kind_of(server)), f"train-0-{number}-0-1"
            with pytest.raises(GenerationFailed):
                await client.generate(engine, [1], SamplingParams(), seed=0, max_tokens=4, request_id=name)

        await asyncio.gather(*(generate(number) for number in range(200)))
        watching.cancel()
        await client.close()
    assert len(server.log.of("arrived")) == 600
    assert sorted(lags)[len(lags) * 99 // 100] < 0.1
