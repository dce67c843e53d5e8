"""Real children: small Python programs that keep, break or ignore the contract of a child process."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from ended_processes import is_gone

from headway.adapters.engines.credentials import handed_down
from headway.errors import ConfigError, EngineFailed, TrainerFailed
from headway.launch.processes import ChildProcess
from headway.secrecy import HIDDEN

pytestmark = pytest.mark.e2e

Start = Callable[..., Awaitable[ChildProcess]]

READY = """
    from headway.lifeline import Lifeline
    line = Lifeline.from_environment()
    line.ready(url="http://127.0.0.1:1234", pid=os.getpid())
    """
WAIT = "signal.pause()"
LIMIT = 120.0


def program(*parts: str) -> list[str]:
    return [sys.executable, "-c", "import os, signal, subprocess, sys\n" + "\n".join(textwrap.dedent(part) for part in parts)]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    children: list[ChildProcess] = []

    async def begin(*parts: str) -> ChildProcess:
        child = await ChildProcess.start(
            "engine-0",
            program(*parts),
            log=tmp_path / "logs" / "engine-0.log",
            error=EngineFailed,
            threads=1,
        )
        children.append(child)
        return child

    yield begin
    for child in children:
        await child.stop(0.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110 - other processes raise no event here
            await asyncio.sleep(0.01)


async def test_a_child_that_is_ready_tells_its_facts(start: Start) -> None:
    child = await start(READY, WAIT)
    facts = await child.ready(LIMIT)
    assert facts == {"url": "http://127.0.0.1:1234", "pid": child.pid}
    assert await child.stop(LIMIT) == -signal.SIGTERM
    assert is_gone(child.pid)


async def test_a_child_that_dies_before_it_is_ready_is_noticed_at_once_with_its_last_words(start: Start) -> None:
    child = await start("print('loading'); sys.exit('headway: model.path: no such file\\nits detail')")
    before = time.monotonic()
    with pytest.raises(EngineFailed) as caught:
        await child.ready(3600.0)
    assert time.monotonic() - before < LIMIT
    assert str(caught.value) == f"engine-0 ended before it was ready (exit code 1): model.path: no such file; its log: {child.log}"
    assert caught.value.detail == "its detail"


async def test_bad_input_that_a_child_finds_is_bad_input(start: Start) -> None:
    child = await start("print('headway: device = \"cuda\" cannot be used here'); sys.exit(2)")
    with pytest.raises(
        ConfigError, match=r'engine-0 ended before it was ready \(exit code 2\): device = "cuda" cannot be used here; its log'
    ):
        await child.ready(3600.0)


async def test_a_child_that_dies_of_a_bug_is_told_by_the_end_of_its_log(start: Start) -> None:
    child = await start("print('loading'); raise KeyError('lost')")
    with pytest.raises(EngineFailed, match=r"engine-0 ended before it was ready \(exit code 1\): KeyError: 'lost'; its log") as caught:
        await child.ready(3600.0)
    assert caught.value.detail.startswith("loading\nTraceback")


async def test_a_key_that_a_child_writes_into_its_log_is_not_quoted_from_there(start: Start) -> None:
    with handed_down(key="k3y-of-this-run", urls=[]):
        says = "print('args: api_key=' + os.environ['HEADWAY_ENGINE_KEY'], flush=True)"
        child = await start(says, "raise RuntimeError('not with ' + os.environ['HEADWAY_ENGINE_KEY'])")
        with pytest.raises(EngineFailed) as caught:
            await child.ready(LIMIT)
    assert f"RuntimeError: not with {HIDDEN}" in str(caught.value)
    assert f"args: api_key={HIDDEN}" in caught.value.detail
    assert "k3y" not in f"{caught.value} {caught.value.detail}"


async def test_a_child_that_is_never_ready_is_given_up_after_the_limit(start: Start) -> None:
    child = await start("print('still loading')", WAIT)
    await until(lambda: "still loading" in child.log.read_text())
    with pytest.raises(EngineFailed, match=r"engine-0 was not ready within 0.05 s; its log: .*engine-0.log") as caught:
        await child.ready(0.05)
    assert caught.value.detail == "still loading"


async def test_a_child_that_cannot_be_started_is_an_error_of_its_kind(tmp_path: Path) -> None:
    with pytest.raises(TrainerFailed, match=r"the trainer could not be started: .*no-such-program: No such file"):
        await ChildProcess.start("the trainer", [str(tmp_path / "no-such-program")], log=tmp_path / "trainer.log", error=TrainerFailed)


async def test_a_child_that_dies_while_it_serves_fails_its_watch(start: Start) -> None:
    child = await start(READY, WAIT)
    await child.ready(LIMIT)
    watch = asyncio.create_task(child.watch())
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match=r"engine-0 ended unexpectedly \(killed by SIGKILL\); its log: "):
        await watch


@pytest.mark.parametrize("code", [0, 1])
async def test_a_child_that_may_end_fails_its_watch_only_when_it_ends_badly(tmp_path: Path, code: int) -> None:
    child = await ChildProcess.start(
        "trainer", program(READY, f"sys.exit({code})"), log=tmp_path / "trainer.log", error=TrainerFailed, may_end=True
    )
    await child.ready(LIMIT)
    if code:
        with pytest.raises(TrainerFailed, match=r"trainer ended unexpectedly \(exit code 1\)"):
            await child.watch()
    else:
        await child.watch()
    await child.stop(LIMIT)


async def test_a_stop_that_was_asked_for_is_no_failure(start: Start) -> None:
    child = await start(READY, WAIT)
    await child.ready(LIMIT)
    watch = asyncio.create_task(child.watch())
    await child.stop(LIMIT)
    await watch


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(start: Start) -> None:
    child = await start("signal.signal(signal.SIGTERM, signal.SIG_IGN)", READY, "while True: signal.pause()")
    await child.ready(LIMIT)
    assert await child.stop(0.1) == -signal.SIGKILL
    assert await child.stop(0.1) == -signal.SIGKILL


async def test_a_child_may_use_its_grace_to_clean_up(start: Start) -> None:
    child = await start("signal.signal(signal.SIGTERM, lambda *_: (print('cleaned'), sys.exit(0)))", READY, WAIT)
    await child.ready(LIMIT)
    assert await child.stop(LIMIT) == 0
    assert child.log.read_text() == "cleaned\n"


async def test_what_a_child_leaves_behind_ends_with_it(start: Start) -> None:
    grandchild = "line.ready(grandchild=subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']).pid)"
    child = await start(READY.replace("line.ready(", "dict("), grandchild, WAIT)
    facts = await child.ready(LIMIT)
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: is_gone(facts["grandchild"]))


async def test_a_child_has_a_session_of_its_own_one_thread_and_no_access_to_model_hubs(start: Start) -> None:
    names = ["OMP_NUM_THREADS", "HF_HUB_OFFLINE"]
    told = f"line.ready(session=os.getsid(0), variables=[os.environ[name] for name in {names}])"
    child = await start(READY.replace("line.ready(", "dict("), told, WAIT)
    assert await child.ready(LIMIT) == {"session": child.pid, "variables": ["1", "1"]}


async def test_a_child_is_gone_within_seconds_after_its_parent_was_killed(tmp_path: Path) -> None:
    watching = program(READY, "line.watch(lambda: os._exit(0))", WAIT)
    parent = f"""
        import asyncio
        from pathlib import Path
        from headway.errors import EngineFailed
        from headway.launch.processes import ChildProcess

        async def main():
            child = await ChildProcess.start("child", {watching!r}, log=Path({str(tmp_path / "child.log")!r}), error=EngineFailed)
            print((await child.ready({LIMIT}))["pid"], flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
        """
    with subprocess.Popen(program(parent), stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220 - to be killed, not awaited
        assert process.stdout is not None
        pid = int(await asyncio.to_thread(process.stdout.readline))
        assert not is_gone(pid)
        process.kill()
    await until(lambda: is_gone(pid))
