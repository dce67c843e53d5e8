"""A supervisor starts a child again when it dies, with bounds; what is stated on purpose ends it at once. Real, small children."""

import asyncio
import logging
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway.errors import TrainerFailed
from headway.launch.processes import ChildProcess
from headway.launch.supervisor import Supervisor

pytestmark = pytest.mark.e2e

READY = "from headway.lifeline import Lifeline; line = Lifeline.from_environment(); line.ready(ok=True)"
LIMIT = 120.0
TOLD = logging.getLogger("headway.trainer")


class Nursery:
    """Starts one child after the other, each by the next program (the last for ever)."""

    def __init__(self, tmp_path: Path, *programs: str) -> None:
        self.programs = [f"import signal, sys\n{textwrap.dedent(program)}" for program in programs]
        self.log = tmp_path / "trainer.log"
        self.started: list[ChildProcess] = []
        self.progress = 0
        self.deaths: list[str] = []

    async def again(self) -> ChildProcess:
        program = self.programs[min(len(self.started), len(self.programs) - 1)]
        child = await ChildProcess.start(
            "trainer", [sys.executable, "-c", program], log=self.log, error=TrainerFailed, threads=1, may_end=True
        )
        self.started.append(child)
        return child

    async def supervisor(self, max_restarts: int = 2) -> Supervisor:
        supervisor = Supervisor(
            await self.again(), max_restarts=max_restarts, setting="trainer.max_restarts", start_timeout_seconds=LIMIT, log=TOLD
        )
        await supervisor.child.ready(LIMIT)
        return supervisor

    async def run(self, supervisor: Supervisor, **more: object) -> None:
        await supervisor.run(
            again=self.again,
            progress=lambda: self.progress,
            died=lambda error: self.deaths.append(str(error)),
            **more,  # type: ignore[arg-type]
        )

    async def until(self, count: int, supervisor: Supervisor) -> None:
        async with asyncio.timeout(LIMIT):
            while len(self.started) < count or supervisor.child is not self.started[-1]:  # noqa: ASYNC110 - processes raise no event
                await asyncio.sleep(0.01)


@pytest.fixture
async def stopped() -> AsyncIterator[list[Supervisor]]:
    supervisors: list[Supervisor] = []
    yield supervisors
    for supervisor in supervisors:
        await supervisor.stop(0.0)


STAYS = f"{READY}; signal.pause()"
DIES = f"{READY}; raise KeyError('lost')"


async def test_a_child_that_is_killed_is_started_again_and_nobody_is_told_of_a_failure(
    tmp_path: Path, stopped: list[Supervisor], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headway")
    nursery = Nursery(tmp_path, STAYS)
    supervisor = await nursery.supervisor()
    stopped.append(supervisor)
    running = asyncio.create_task(nursery.run(supervisor))
    os.kill(supervisor.child.pid, signal.SIGKILL)
    await nursery.until(2, supervisor)
    assert (supervisor.failure(), supervisor.restarts) == (None, 1)
    assert "killed by SIGKILL" in nursery.deaths[0]
    async with asyncio.timeout(LIMIT):
        while "trainer is up again" not in caplog.text:  # noqa: ASYNC110 - processes raise no event
            await asyncio.sleep(0.01)
    await supervisor.stop(LIMIT)
    await running
    assert supervisor.failure() is None
    died, again = [record.getMessage() for record in caplog.records if record.name == TOLD.name]
    assert "killed by SIGKILL" in died
    assert "(1 of trainer.max_restarts 2 in a row)" in died
    assert again == "trainer is up again"


async def test_one_that_does_not_get_on_is_given_up_with_its_cause_and_its_count(tmp_path: Path, stopped: list[Supervisor]) -> None:
    nursery = Nursery(tmp_path, DIES)
    supervisor = await nursery.supervisor(max_restarts=2)
    stopped.append(supervisor)
    with pytest.raises(TrainerFailed, match=r"KeyError: 'lost'; its log: .*; it had been started again 2 times in a row") as caught:
        await nursery.run(supervisor)
    assert (len(nursery.started), supervisor.restarts, len(nursery.deaths)) == (3, 2, 2)
    assert supervisor.failure() == str(caught.value)
    assert isinstance(caught.value.__cause__, TrainerFailed)
    assert "Traceback" in caught.value.detail


async def test_the_count_begins_anew_when_it_has_got_on(tmp_path: Path, stopped: list[Supervisor]) -> None:
    nursery = Nursery(tmp_path, STAYS)
    supervisor = await nursery.supervisor(max_restarts=1)
    stopped.append(supervisor)
    running = asyncio.create_task(nursery.run(supervisor))
    for lives in range(2, 5):
        nursery.progress += 1
        os.kill(supervisor.child.pid, signal.SIGKILL)
        await nursery.until(lives, supervisor)
    assert (supervisor.restarts, running.done()) == (3, False)
    running.cancel()


@pytest.mark.parametrize("code", [1, 2])
async def test_what_a_child_states_on_purpose_is_not_tried_again(tmp_path: Path, stopped: list[Supervisor], code: int) -> None:
    nursery = Nursery(tmp_path, f"{READY}; print('headway: batch 3: the bound is breached [bug]'); sys.exit({code})")
    supervisor = await nursery.supervisor()
    stopped.append(supervisor)
    with pytest.raises(TrainerFailed, match=rf"\(exit code {code}\): batch 3: the bound is breached; its log") as caught:
        await nursery.run(supervisor)
    assert (len(nursery.started), supervisor.failure()) == (1, str(caught.value))


async def test_a_child_whose_last_words_found_no_room_has_stated_them_all_the_same(tmp_path: Path, stopped: list[Supervisor]) -> None:
    nursery = Nursery(tmp_path, f"{READY}; print('at version 3'); sys.exit(1)")  # its disk, and its log's, is full
    supervisor = await nursery.supervisor()
    stopped.append(supervisor)
    with pytest.raises(TrainerFailed, match=r"\(exit code 1\): at version 3"):
        await nursery.run(supervisor)
    assert len(nursery.started) == 1


async def test_a_bug_of_a_child_is_not_stated_on_purpose(tmp_path: Path, stopped: list[Supervisor]) -> None:
    broken = "from headway.cli import command_line\nfrom headway.cli.commands import app\n@app.command()\ndef broken(): {}['lost']\n"
    nursery = Nursery(tmp_path, f"{READY}\n{broken}sys.exit(command_line(['broken']))", STAYS)
    supervisor = await nursery.supervisor()
    stopped.append(supervisor)
    running = asyncio.create_task(nursery.run(supervisor))
    await nursery.until(2, supervisor)
    assert "KeyError: 'lost'" in nursery.deaths[0]
    running.cancel()


async def test_what_a_predecessor_stated_is_not_taken_for_a_successors_word(tmp_path: Path, stopped: list[Supervisor]) -> None:
    nursery = Nursery(tmp_path, STAYS, DIES, STAYS)
    nursery.log.write_text("headway: stated by a run long ago\n")
    supervisor = await nursery.supervisor()
    stopped.append(supervisor)
    running = asyncio.create_task(nursery.run(supervisor))
    os.kill(supervisor.child.pid, signal.SIGKILL)
    await nursery.until(3, supervisor)
    assert ["KeyError" in death for death in nursery.deaths] == [False, True]
    running.cancel()


async def test_a_successor_that_never_comes_up_counts_too(tmp_path: Path, stopped: list[Supervisor]) -> None:
    nursery = Nursery(tmp_path, STAYS, "raise KeyError('no device')")
    supervisor = await nursery.supervisor(max_restarts=2)
    stopped.append(supervisor)
    os.kill(supervisor.child.pid, signal.SIGKILL)
    with pytest.raises(TrainerFailed, match=r"ended before it was ready .*KeyError: 'no device'.*2 times in a row"):
        await nursery.run(supervisor)
    assert len(nursery.started) == 3


@pytest.mark.parametrize("finished", [True, False])
async def test_one_that_ends_in_order_is_started_again_unless_its_work_is_done(
    tmp_path: Path, stopped: list[Supervisor], *, finished: bool
) -> None:
    nursery = Nursery(tmp_path, f"{READY}; sys.exit(0)", STAYS)
    supervisor = await nursery.supervisor()
    stopped.append(supervisor)
    running = asyncio.create_task(nursery.run(supervisor, finished=lambda: finished))
    if finished:
        await running
        assert "exit code 0" in (supervisor.failure() or "")
    else:
        await nursery.until(2, supervisor)
        assert supervisor.failure() is None
        running.cancel()


async def test_while_a_successor_is_started_whoever_waits_for_it_knows(tmp_path: Path, stopped: list[Supervisor]) -> None:
    nursery, told = Nursery(tmp_path, STAYS), []

    @contextmanager
    def meanwhile():
        told.append(len(nursery.started))
        yield
        told.append(len(nursery.started))

    supervisor = await nursery.supervisor()
    stopped.append(supervisor)
    running = asyncio.create_task(nursery.run(supervisor, meanwhile=meanwhile))
    os.kill(supervisor.child.pid, signal.SIGKILL)
    await nursery.until(2, supervisor)
    async with asyncio.timeout(LIMIT):
        while len(told) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert told == [1, 2]
    running.cancel()
