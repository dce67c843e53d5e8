"""Fault cases of the engines' client (I): limits that libraries set by default, of connections, threads, handles and time."""

import asyncio
import resource
import selectors
import socket
import subprocess
import sys
import textwrap
import threading

import pytest
from scripted_engine import Hold, ScriptedEngine

from headway.adapters.engines.client import EngineClient
from headway.adapters.engines.generation import GenerationFailed
from headway.testing import EngineScript, FakeEngine, Reply, Rule
from headway.types import EngineAddress, SamplingParams


async def generate(client, url, number=0, kind="vllm", **more):
    return await client.generate(
        EngineAddress(url, kind), [5, 6], SamplingParams(), seed=number, max_tokens=4, request_id=f"r{number}", **more
    )


@pytest.mark.parametrize("requests", [400, 1000], ids=["I01", "I02"])
async def test_I01_I02_as_many_requests_are_in_flight_as_are_sent_and_no_thread_waits_for_them(requests):
    """Each is held until all have arrived: a pool of connections, or of threads, that is smaller would never let them."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors[1], descriptors[1]))
    release, client, threads = asyncio.Event(), EngineClient("abc"), threading.active_count()
    try:
        async with ScriptedEngine(Hold(release), label="abc-3") as engine, asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(generate(client, engine.url, number)) for number in range(requests)]
            await engine.until(lambda: engine.running == requests)
            assert threading.active_count() <= threads + 1
            release.set()
        assert all(call.result().token_ids for call in calls)
        assert engine.peak == requests
    finally:
        await client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)


FEW_HANDLES = """
    import asyncio, os, resource, sys
    from headway.adapters.engines.client import EngineClient
    from headway.adapters.engines.http import HttpPool
    from headway.types import EngineAddress, SamplingParams

    REQUESTS, AT_ONCE = int(sys.argv[2]), 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    def handles():
        return len(os.listdir("/proc/self/fd"))

    async def main(url):
        client, admin, most, numbers = EngineClient("abc"), HttpPool(), 0, iter(range(REQUESTS))

        async def work():
            nonlocal most
            for number in numbers:
                await client.generate(EngineAddress(url), [5], SamplingParams(), seed=number, max_tokens=1, request_id=f"r{number}")
                if number % 20 == 0:
                    await admin.request("GET", url + "/weight_info", fresh=True)
                    most = max(most, handles())

        before = handles()
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        await client.close()
        await admin.close()
        print(most - before)

    asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.e2e
def test_I03_thousands_of_short_requests_keep_a_bounded_number_of_handles_and_connections(tmp_path):
    """With `ulimit -n 256`; a connection per request would be told by its port."""
    requests, at_once = 3000, 64
    script = """
        import asyncio, sys
        from aiohttp import web
        ports = set()
        BODY = (b'{"choices": [{"token_ids": [7], "finish_reason": "stop", "logprobs": {"content": [{"logprob": -1.0}]},'
                b' "weight_versions": [{"version": "abc-3", "start": 0, "end": 1}]}]}')

        async def answer(request):
            if request.path == "/ports":
                return web.Response(text=str(len(ports)))
            if request.path == "/weight_info":
                return web.Response(text='{"weight_version": "abc-3"}')
            await request.read()
            ports.add(request.transport.get_extra_info("peername")[1])
            return web.Response(body=BODY)

        async def main():
            runner = web.ServerRunner(web.Server(answer, access_log=None))
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            print(runner.addresses[0][1], flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            told = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(FEW_HANDLES), url, str(requests)],
                check=False,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert told.returncode == 0, told.stderr
            assert int(told.stdout) <= at_once + 50
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as asking:
                asking.sendall(b"GET /ports HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                answer = b"".join(iter(lambda: asking.recv(4096), b""))
            assert int(answer.rpartition(b"\r\n")[2]) <= 2 * at_once, "connections are kept"
        finally:
            server.kill()


SPEED = 100  # seconds of the loop in one of the clock's


class FastLoop(asyncio.SelectorEventLoop):
    """A real loop with real sockets, on which waiting passes a hundred times faster, and nothing else takes time: not a busy machine."""

    def __init__(self):
        fast = self

        class Selector(selectors.DefaultSelector):
            def select(self, timeout=None):
                found = super().select(timeout / SPEED if timeout and timeout > 0 else timeout)
                fast.waited += timeout if timeout and timeout > 0 and not found else 0.0
                return found

        self.waited = 0.0
        super().__init__(Selector())

    def time(self):
        return self.waited


def on_fast_loop(work):
    with asyncio.Runner(loop_factory=FastLoop) as runner:
        return runner.run(work)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_I05_a_generation_may_take_six_minutes(kind):
    async def main():
        client, loop = EngineClient("abc", connect_timeout_seconds=60), asyncio.get_running_loop()
        async with FakeEngine([Rule(do=Reply(seconds=360.0))], script=EngineScript(speaks=kind, label="abc-3")) as engine:
            began = loop.time()
            made = await generate(client, engine.url, kind=kind)
            await client.close()
        return made, loop.time() - began, len([entry for entry in engine.log.entries if entry["what"] == "arrived"])

    made, seconds, arrived = on_fast_loop(main())
    assert made.token_ids
    assert seconds >= 360
    assert arrived == 1, "and was asked for once"


def test_I05_an_engine_that_does_not_accept_connections_is_noticed_within_seconds():
    async def main():
        client, loop = EngineClient("abc", retries=0), asyncio.get_running_loop()
        with socket.socket() as listening, socket.socket() as first, socket.socket() as second:
            listening.bind(("127.0.0.1", 0))
            listening.listen(0)
            for filling in (first, second):  # the queue is full, and nobody takes from it
                filling.setblocking(False)
                filling.connect_ex(listening.getsockname())
            began = loop.time()
            with pytest.raises(GenerationFailed, match="did not accept a connection within 5 s"):
                await generate(client, f"http://127.0.0.1:{listening.getsockname()[1]}")
            await client.close()
        return loop.time() - began

    assert 5 <= on_fast_loop(main()) < 60
