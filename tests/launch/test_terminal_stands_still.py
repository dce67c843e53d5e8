"""A terminal that stands still, or a pipe that nobody empties: the run goes on, what is lost is counted, and the process ends."""

import contextlib
import logging
import os
import subprocess
import sys
import threading

import pytest
from terminals import Standing

from headway.launch.telling import parts_told, show, tell

WAITS_SECONDS = 120.0  # only who blocks for ever takes so long

UNREAD = """
import asyncio, logging, sys
from headway.cli.streams import leave_nothing_unwritten, leave_within
from headway.launch.telling import parts_told, show, tell

async def main():
    for number in range(3000):
        tell(f"line {number} " + "x" * 2000)
        logging.getLogger("headway.engines").warning("engine %d", number)
        logging.getLogger("aiohttp.server").error("request %d", number)
        show(f"shown {number}")
        await asyncio.sleep(0)

with parts_told():
    asyncio.run(main())
print("through", flush=True)
leave_within(1.0, 7)
leave_nothing_unwritten()
sys.exit(7)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])  # a writer that is held up has the stream's lock, or there is none
def test_a_pipe_that_nobody_empties_holds_nobody_up_and_the_process_ends_as_it_would(unbuffered):
    command = [sys.executable, "-c", UNREAD]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}
    ) as process:
        limit = threading.Timer(WAITS_SECONDS, process.kill)
        limit.start()
        try:
            assert process.stdout.readline() == "through\n"
            assert process.wait() == 7
        finally:
            limit.cancel()
        lines = process.stderr.read().splitlines()
    told = [line.split(" x")[0] for line in lines if "lines are missing here" not in line][:-1]  # the last may be torn
    said = [text for n in range(3000) for text in (f"headway: line {n}", f"headway: engine {n}", f"request {n}", f"shown {n}")]
    assert told[:4] == said[:4]
    assert len(told) < len(said)
    rest = iter(said)
    assert all(line in rest for line in told), "in their order"


LAST = """
import os
from headway.launch.telling import parts_told, tell, tell_last

with parts_told():
    for number in range(100):
        tell(f"line {number}")
    tell_last("killed: it was wedged")
    os._exit(3)
"""


def test_who_ends_the_process_is_heard_first():
    done = subprocess.run([sys.executable, "-c", LAST], capture_output=True, text=True, timeout=WAITS_SECONDS, check=False)
    assert done.returncode == 3
    assert done.stderr.splitlines() == [*(f"headway: line {n}" for n in range(100)), "headway: killed: it was wedged"]


LIBRARY = """
import logging
from headway.launch.telling import parts_told
from headway.secrecy import keep_secret

keep_secret("a-long-secret")
before = logging.lastResort
with parts_told():
    logging.getLogger("library").info("not worth it")
    try:
        raise ValueError("a-long-secret")
    except ValueError:
        logging.getLogger("library").exception("it went wrong")
assert logging.lastResort is before
"""


def test_what_a_library_logs_is_shown_with_its_traceback_and_without_secrets():
    done = subprocess.run([sys.executable, "-c", LIBRARY], capture_output=True, text=True, timeout=WAITS_SECONDS, check=True)
    first, *_, last = done.stderr.splitlines()
    assert (first, last) == ("it went wrong", "ValueError: ***")
    assert "Traceback (most recent call last):" in done.stderr


def test_lines_that_there_was_no_room_for_are_counted_where_they_would_stand(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "headway")
    monkeypatch.setattr(sys, "stderr", standing := Standing())
    with parts_told():
        tell("line 0")
        assert standing.asked.wait(WAITS_SECONDS)
        for number in range(1, 1000):
            tell(f"line {number}")
        standing.goes_on.set()
    *lines, note = standing.getvalue().splitlines()
    assert lines == [f"headway: line {n}" for n in range(len(lines))]
    assert note == f"headway: {1000 - len(lines)} lines are missing here, as nobody read: events.log has what was said"
    assert [record.getMessage() for record in caplog.records] == [f"line {n}" for n in range(1000)], "the log has them all"


def test_the_terminal_is_waited_for_no_longer_than_a_moment_at_the_end(monkeypatch):
    monkeypatch.setattr(sys, "stderr", standing := Standing())
    over = threading.Event()

    def play():
        with parts_told():
            tell("a line")
        over.set()

    threading.Thread(target=play, daemon=True).start()
    assert over.wait(WAITS_SECONDS)
    assert not standing.goes_on.is_set()
    standing.goes_on.set()


def test_outside_of_a_run_a_line_is_printed_at_once(capsys):
    tell("one")
    show("two")
    assert capsys.readouterr().err == "headway: one\ntwo\n"


def test_a_command_that_fails_ends_with_its_code_though_nobody_reads_why(tmp_path):
    ours, theirs = os.pipe()
    try:
        os.set_blocking(theirs, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(theirs, b"x" * 4096)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(theirs, b"x")
        os.set_blocking(theirs, True)
        command = [sys.executable, "-m", "headway", "check", str(tmp_path / "none.toml")]
        done = subprocess.run(command, stderr=theirs, stdout=subprocess.DEVNULL, timeout=WAITS_SECONDS, check=False)
        assert done.returncode == 2
    finally:
        os.close(ours)
        os.close(theirs)
