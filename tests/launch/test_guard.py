"""The guard of a foreign server: real processes, which serve, die, ignore signals and leave others behind."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
from ended_processes import is_gone
from held_ports import held_ports

from headway.errors import ConfigError, EngineFailed
from headway.launch.processes import ChildProcess
from headway.launch.starting import told_about

pytestmark = pytest.mark.e2e

LIMIT = 120.0
Start = Callable[..., Awaitable[ChildProcess]]

SERVES = """
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200 if healthy() else 503)
        def do_POST(self):
            asked = self.rfile.read(int(self.headers["Content-Length"]))
            print("asked", self.path, asked.decode(), self.headers["Authorization"], flush=True)
            self.answer(warm_up)
        def answer(self, status):
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
        def log_message(self, *_):
            pass
    looks = iter(range(10**6))
    healthy, warm_up = lambda: True, 200
    """
FOREVER = 'ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()'
LEAVES = (
    'left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True); print(left.pid, flush=True)'
)


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a server: nobody else's, also while it starts, and where it never listens."""
    with held_ports() as held:
        yield held


def command(*parts: str, port: int, grace: float = 5.0, heeds: bool = False) -> list[str]:
    program = "import os, signal, subprocess, sys, time\n" + "\n".join(textwrap.dedent(part) for part in parts)
    guard = ["--url", f"http://127.0.0.1:{port}", "--warm-up", "/generate", "--body", '{"n": 1}', "--grace", f"{grace:g}"]
    guard += ["--heed-health"] if heeds else []
    return [sys.executable, "-m", "headway.launch.guard", *guard, "--", sys.executable, "-c", program, str(port)]


@pytest.fixture
async def start(tmp_path: Path, port: int) -> AsyncIterator[Start]:
    children: list[ChildProcess] = []

    async def begin(*parts: str, grace: float = 5.0, heeds: bool = False, **options: object) -> ChildProcess:
        child = await ChildProcess.start(
            "engine-0",
            command(*parts, port=port, grace=grace, heeds=heeds),
            log=tmp_path / "logs" / "engine-0.log",
            error=EngineFailed,
            foreign=True,
            **options,  # type: ignore[arg-type]
        )
        children.append(child)
        return child

    yield begin
    for child in children:
        await child.stop(0.0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110 - other processes raise no event here
            await asyncio.sleep(0.01)


def server_of(child: ChildProcess) -> psutil.Process:
    [server] = psutil.Process(child.pid).children()
    return server


def number_in(child: ChildProcess) -> int:
    return next(int(line) for line in child.log.read_text().splitlines() if line.isdecimal())


async def test_a_server_is_ready_when_it_is_healthy_and_has_answered_a_generation(start: Start) -> None:
    child = await start(SERVES, "healthy = lambda: next(looks) > 1", FOREVER, environment={"HEADWAY_ENGINE_KEY": "the-key"})
    facts = await child.ready(LIMIT)
    assert facts["url"].startswith("http://127.0.0.1:")
    told = child.log.read_text()
    assert 'asked /generate {"n": 1} Bearer the-key' in told
    assert "warm-up: /generate answered 200" in told
    assert await child.stop(LIMIT) == -signal.SIGTERM


async def test_a_generation_that_is_refused_is_noted_and_no_reason_to_wait(start: Start) -> None:
    child = await start(SERVES, "warm_up = 403", FOREVER)
    await child.ready(LIMIT)
    assert "warm-up: /generate answered 403" in child.log.read_text()


async def test_the_guard_ends_as_its_server_has_ended(start: Start) -> None:
    child = await start(SERVES, FOREVER)
    await child.ready(LIMIT)
    server_of(child).kill()
    assert "engine-0 ended unexpectedly (killed by SIGKILL)" in str(await child.death())
    child = await start("print('RuntimeError: no room'); print('goodbye'); sys.exit(7)")
    error = await child.death()
    assert "(exit code 7): RuntimeError: no room; its log: " in str(error)
    assert not child.stated  # a server's exit code says nothing


async def test_a_server_that_says_that_it_is_dead_and_stays_is_ended(start: Start) -> None:
    child = await start(SERVES, "healthy = lambda: (look := next(looks)) == 0 or look == 2", FOREVER, heeds=True)  # once is not enough
    await child.ready(LIMIT)
    error = await child.death()
    assert "engine-0 ended unexpectedly" in str(error)
    told = child.log.read_text()
    assert "/health has answered 503 3 times in a row: the server is ended" in told


async def test_a_program_that_cannot_be_started_is_bad_input(tmp_path: Path, port: int) -> None:
    program = command("", port=port)
    program[program.index("--") + 1] = "/no/such/python"
    child = await ChildProcess.start("engine-0", program, log=tmp_path / "log", error=EngineFailed, foreign=True)
    with pytest.raises(ConfigError, match="/no/such/python cannot be started: No such file or directory"):
        await child.ready(LIMIT)
    await child.stop(0.0)


async def test_what_a_server_leaves_in_a_session_of_its_own_ends_with_it(start: Start) -> None:
    child = await start(LEAVES, SERVES, FOREVER)
    await child.ready(LIMIT)
    left = number_in(child)
    assert not is_gone(left)
    server_of(child).kill()
    await child.death()
    await until(lambda: is_gone(left))


async def test_a_server_that_ignores_sigterm_is_killed_after_the_guards_grace(start: Start) -> None:
    child = await start("signal.signal(signal.SIGTERM, signal.SIG_IGN)", LEAVES, SERVES, FOREVER, grace=0.2)
    await child.ready(LIMIT)
    server, left = server_of(child), number_in(child)
    os.kill(child.pid, signal.SIGTERM)  # the guard alone
    await until(lambda: is_gone(server.pid) and is_gone(left))
    assert "killed by SIGKILL" in str(await child.death())


async def test_a_guard_that_is_killed_takes_its_server_along(start: Start) -> None:
    child = await start(SERVES, FOREVER)
    await child.ready(LIMIT)
    server = server_of(child)
    os.kill(child.pid, signal.SIGKILL)
    await child.death()
    await until(lambda: is_gone(server.pid))


@pytest.mark.parametrize("heeds", ["pass", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
async def test_nothing_is_left_when_the_orchestrator_was_killed(tmp_path: Path, port: int, heeds: str) -> None:
    guarded = command(heeds, LEAVES, SERVES, FOREVER, port=port, grace=0.3)
    log = tmp_path / "engine.log"
    parent = f"""
        import asyncio
        from pathlib import Path
        from headway.errors import EngineFailed
        from headway.launch.processes import ChildProcess

        async def main():
            child = await ChildProcess.start("engine-0", {guarded!r}, log=Path({str(log)!r}), error=EngineFailed, foreign=True)
            await child.ready({LIMIT})
            print(child.pid, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
        """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent)], stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        assert process.stdout is not None
        guard = int(await asyncio.to_thread(process.stdout.readline))
        all_of_them = [guard, *(child.pid for child in psutil.Process(guard).children(recursive=True))]
        assert len(all_of_them) == 3
        process.kill()
    await until(lambda: all(is_gone(pid) for pid in all_of_them))


async def test_a_start_that_takes_long_is_told_about(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    child = await start(
        "print('Loading shards: 3 of 7', flush=True)",
        SERVES,
        "healthy = lambda: os.path.exists(os.environ['GO'])",
        FOREVER,
        environment={"GO": "/nonexistent"},
    )
    told: list[str] = []

    def told_so_far() -> str:
        told.append(capsys.readouterr().err)
        return "".join(told)

    waiting = asyncio.create_task(told_about(child, LIMIT, tell_seconds=0.05))
    await until(lambda: '"Loading shards: 3 of 7"' in told_so_far())
    assert re.search(r"headway: engine-0 is starting, \d+ s of at most 120 s", told_so_far())
    waiting.cancel()
    await asyncio.wait({waiting})
