"""Fault cases of engines, over real HTTP: administrative calls that fail, hang or are refused, and engines that are always busy."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from scripted_engine import Break, Hold, Reply, ScriptedEngine, Status, Tokens

from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.generation import GenerationFailed
from headway.adapters.engines.vllm import VllmEngine
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
from headway.types import AttemptRequest, Checkpoint, EngineAddress, Failure, Prompt, SamplingParams

CALLS = ["/pause", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/resume", "/weight_info"]
FAULTS: dict[str, Callable[[], Reply]] = {
    "503": lambda: Status(503, "busy"),
    "reset": Break,
    "timeout": lambda: Hold(asyncio.Event()),
}
Faults = Mapping[str, Sequence[Reply]]


class Fleet:
    """Real clients of scripted engines, the watcher that gives them weights, and a trainer that has just made version 1."""

    def __init__(self, servers: list[ScriptedEngine], directory: Path, *, lost_timeout_seconds: float = 20.0) -> None:
        settings = EngineSection(request_timeout_seconds=0.3, recompute_kv=False)
        self.servers = servers
        self.clients = [VllmEngine(f"engine-{n}", server.url, settings) for n, server in enumerate(servers)]
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
        save_file({"weight": np.full((2, 3), version, np.float32)}, directory / "model.safetensors")
        return Checkpoint(version, f"abc-{version}", str(directory))

    async def checkpoint(self, after: int) -> Checkpoint:
        """The trainer's: version 1."""
        return self.weights(after + 1)

    async def serves(self, version: int, *, by: int, faults: Faults = {}) -> None:  # noqa: B006
        """Start with version 0; then the last engine has faults. Return once the version is published for so many engines."""
        await self.watcher.start(self.weights(0))
        self.servers[-1].refusals = {path: list(replies) for path, replies in faults.items()}
        self.record(BatchFormed(0.0, 0, (), 0.0))
        services = [asyncio.create_task(each()) for each in (self.watcher.run, self.probe.run, self.pool.run)]
        try:
            async with asyncio.timeout(20):
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
            for client in self.clients:
                await client.close()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("call", CALLS)
async def test_E03_the_first_two_of_a_call_fail_and_the_engine_ends_unpaused(tmp_path: Path, call: str, fault: str) -> None:
    async with ScriptedEngine(Tokens([1])) as server:
        fleet = Fleet([server], tmp_path)
        await fleet.serves(1, by=1, faults={call: [FAULTS[fault](), FAULTS[fault]()]})
        assert (server.paused, server.label) == (False, "abc-1")
        assert not server.refusals[call]


async def test_E03_a_call_that_fails_for_ever_ends_the_run_and_not_in_silence(tmp_path: Path) -> None:
    async with ScriptedEngine(Tokens([1])) as server:
        fleet = Fleet([server], tmp_path, lost_timeout_seconds=1.0)
        with pytest.raises(EngineFailed, match=r"engine-0 was lost: .*/collective_rpc failed: it answered 500: no memory"):
            await fleet.serves(1, by=1, faults={"/collective_rpc": [Status(500, "no memory")] * 1000})
        assert not server.paused


async def test_E07_one_of_three_engines_refuses_a_load_and_is_gone_without(tmp_path: Path) -> None:
    async with ScriptedEngine(Tokens([1])) as one, ScriptedEngine(Tokens([1])) as two, ScriptedEngine(Tokens([1])) as three:
        fleet = Fleet([one, three, two], tmp_path)
        await fleet.serves(1, by=2, faults={"/collective_rpc": [Status(500, "no memory")] * 1000})
        assert fleet.published[-1].engines == ("engine-0", "engine-1")
        assert [server.label for server in (one, two, three)] == ["abc-1", "unknown", "abc-1"], (
            "nobody takes half-loaded weights for a version"
        )
        assert [(await fleet.pool.acquire()).name for _ in range(4)] == ["engine-0", "engine-1"] * 2
        assert not any(server.paused for server in (one, two, three))


async def test_I06_one_of_four_engines_takes_a_load_call_and_never_answers(tmp_path: Path) -> None:
    servers = [ScriptedEngine(Tokens([1])) for _ in range(4)]
    async with servers[0], servers[1], servers[2], servers[3]:
        fleet = Fleet(servers, tmp_path)
        await fleet.serves(1, by=3, faults={"/collective_rpc": [Hold(asyncio.Event()) for _ in range(1000)]})
        assert fleet.published[-1].engines == ("engine-0", "engine-1", "engine-2")
        assert not any(server.paused for server in servers)


class Worker:
    """Attempts that are one generation each, as a rollout worker makes them."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.attempts = 0

    async def attempt(self, request: AttemptRequest, move: Mover | None = None) -> Failure:
        self.attempts += 1
        try:
            await self.client.generate(
                EngineAddress(request.engine), [1, 2], request.sampling, seed=request.seed, max_tokens=4, request_id=f"r{request.member}"
            )
        except GenerationFailed as error:
            return Failure(error.cause, str(error), error.retryable)
        raise AssertionError("the engine was to fail")


@pytest.mark.parametrize(
    ("reply", "requests", "attempts"),
    [
        (Status(503, "busy"), 3, 1),  # by the client: once, and twice more; nobody multiplies it
        (Break(), 3, 1),
        (Status(500, "internal"), 3, 3),  # by the attempts: rollout.max_attempts
        (Status(422, "not a number"), 1, 1),
        (Status(404, "<html>no such page</html>"), 1, 1),
    ],
    ids=["503", "reset", "500", "422", "404"],
)
async def test_I07_I11_a_request_is_tried_at_one_level_and_never_multiplied(
    tmp_path: Path, reply: Reply, requests: int, attempts: int
) -> None:
    async with ScriptedEngine(reply) as server:
        fleet = Fleet([server], tmp_path)
        await fleet.watcher.start(fleet.weights(0))
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
        await fleet.clients[0].close()
    assert len(server.requests) == 8 * requests
    assert worker.attempts == 8 * attempts
    assert all(isinstance(failure, Failure) and failure.cause == "engine_error" for failure in ended)
    if isinstance(reply, Status):
        assert all(f"answered {reply.status}: {reply.body}" in failure.detail for failure in ended if isinstance(failure, Failure))


async def test_O06_backing_off_blocks_nobody(tmp_path: Path) -> None:
    """200 rollouts at an engine that is busy, then resets: the loop turns all the time."""
    lags = []

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.01)
            lags.append(time.perf_counter() - before - 0.01)

    replies = [Status(503, "busy"), Break(), Status(429, "busy", {"Retry-After": "0.1"})]
    async with ScriptedEngine(lambda request: replies[int(request["request_id"][1:].partition("-")[0]) % 3]) as server:
        client, watching = EngineClient("abc", retries=2), asyncio.create_task(watch())

        async def generate(number: int) -> None:
            with pytest.raises(GenerationFailed):
                await client.generate(EngineAddress(server.url), [1], SamplingParams(), seed=0, max_tokens=4, request_id=f"r{number}")

        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(generate(number) for number in range(200)))
        waited = time.perf_counter() - began - (time.process_time() - cpu)
        watching.cancel()
        await client.close()
    assert len(server.requests) == 600
    assert waited > 0
    assert sorted(lags)[len(lags) // 2] < 0.1
