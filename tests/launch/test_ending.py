"""The order and the limits of an end: what is on disk before anything is closed, what hangs is named, the exit code says which it was."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCENES = Path(__file__).with_name("ending_scenes.py")
LIMIT = 120.0  # seconds: of a scene that hangs for ever where it is to end


class Scene:
    """A process that plays a scene."""

    def __init__(self, name, directory, **run):
        self.directory = directory
        self.lines = []
        command = [sys.executable, str(SCENES), name, str(directory), json.dumps(run)]
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def until(self, line):
        while line not in self.lines:
            read = self.process.stdout.readline()
            assert read, self.process.communicate()
            self.lines.append(read.rstrip())
        return self

    def until_told(self, words):
        while words not in (line := self.process.stderr.readline()):
            assert line, self.process.communicate()
        return self

    def send(self, number):
        self.process.send_signal(number)
        return self

    def end(self):
        out, self.err = self.process.communicate(timeout=LIMIT)
        self.lines += out.splitlines()
        self.seconds = time.monotonic() - self.began
        return self

    @property
    def code(self):
        return self.process.returncode

    @property
    def ending(self):
        return json.loads((self.directory / "ending.json").read_text())


@pytest.fixture
def scene(tmp_path):
    scenes = []

    def play(name, **run):
        scenes.append(Scene(name, tmp_path, **run))
        return scenes[-1]

    yield play
    for one in scenes:
        one.process.kill()
        one.process.communicate()


def test_a_run_that_is_done_ends_with_0_and_says_where_it_is(scene, tmp_path):
    ended = scene("done").end()
    assert (ended.code, ended.err) == (0, "")
    assert ended.lines == ["journal closes", "saved 0", f"all is done. The run is in {tmp_path}"]
    assert (ended.ending["code"], ended.ending["cause"]) == (0, "all is done")


def test_a_failure_closes_the_journal_and_is_recorded_before_anything_is_closed(scene):
    ended = scene("fails").end()
    assert (ended.code, ended.err) == (1, "headway: the trainer is gone\n")
    assert ended.lines == ["journal closes", "saved 1"]
    assert ended.ending["cause"] == "TrainerFailed: the trainer is gone"


def test_L02_a_journal_that_does_not_close_is_given_up_at_its_limit_and_the_exit_is_an_error_that_names_it(scene):
    ended = scene("journal_hangs").end()
    assert ended.code == 1
    assert "saved 0" not in ended.lines
    assert "the journal and run.json were to be written within run.shutdown_seconds (limit 2 s)" in ended.err
    assert "in for_ever" in ended.err  # where the journal waits
    assert ended.ending["code"] == 1
    assert "killed: the journal" in ended.ending["cause"]


def test_a_journal_that_cannot_be_closed_fails_the_run(scene):
    ended = scene("journal_fails").end()
    assert (ended.code, ended.err) == (1, "headway: the disk is gone\n")
    assert ended.ending["cause"] == "StorageError: the disk is gone"


def test_L02_what_does_not_close_is_named_and_the_exit_is_that_of_the_run(scene):
    ended = scene("closers_hang").end()
    assert ended.code == 0
    assert "not closed within run.shutdown_seconds (4 s), and left or killed: the engine, the worker, the tracker\n" in ended.err
    assert ended.lines.index("saved 0") < ended.lines.index("closed")
    assert ended.ending["code"] == 0
    assert "left or killed: the engine" in (ended.directory / "events.log").read_text()


def test_what_fails_to_close_is_a_warning(scene):
    ended = scene("closers_fail").end()
    assert (ended.code, ended.err) == (0, "")
    log = (ended.directory / "events.log").read_text()
    assert "WARNING closing the engine failed: RuntimeError: cannot be closed" in log
    assert "WARNING closing the tracker failed: OSError: cannot be written" in log
    assert "closed" in ended.lines


def test_H08_everything_is_closed_at_once(scene):
    ended = scene("closed_together").end()
    assert (ended.code, ended.err) == (0, "")  # or it would name who has not closed


def test_a_thread_of_somebody_s_that_never_ends_does_not_hold_the_process(scene):
    assert scene("thread_hangs").end().code == 0  # the thread would have the process wait for ten minutes


@pytest.mark.parametrize(("name", "code"), [("stalls", 3), ("fails_and_hangs", 1)])
def test_an_error_whose_orderly_end_is_wedged_ends_the_process_all_the_same(scene, name, code):
    ended = scene(name).end()
    assert ended.code == ended.ending["code"] == code
    assert "everything was to be stopped (limit 1 s)" in ended.err
    assert "run (ending_scenes.py:" in ended.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_the_exit_code_names_it(scene, number):
    ended = scene("drains").until("runs").send(number).end()
    assert ended.code == ended.ending["code"] == 128 + number
    assert ended.ending["cause"] == f"interrupted by {number.name}"
    assert f"{number.name}: draining; once more stops now" in ended.err


def test_a_run_that_has_reached_its_end_is_not_interrupted_by_who_asks_for_it(scene, tmp_path):
    playing = scene("ends_anyway", drain_timeout_seconds=30.0).until("runs").send(signal.SIGTERM)
    playing.until_told("draining")
    (tmp_path / "asked").touch()
    ended = playing.end()
    assert ended.code == ended.ending["code"] == 0
    assert ended.ending["cause"] == "all 3 steps are trained"


def test_a_drain_that_hangs_is_killed_at_its_limit_and_does_not_exit_as_saved(scene):
    ended = scene("drain_hangs").until("runs").send(signal.SIGTERM).end()
    assert ended.code == ended.ending["code"] == 1
    assert "SIGTERM: the run was to drain (limit 2 s)" in ended.err
    assert "in run" in ended.err  # where it waits


def test_a_drain_that_nobody_has_asked_for_has_the_same_limit(scene):
    ended = scene("own_drain_hangs").end()
    assert ended.code == ended.ending["code"] == 1
    assert "all 3 steps are trained: the run was to drain (limit 2 s)" in ended.err


def test_the_second_signal_stops_and_the_third_kills(scene):
    playing = scene("stop_hangs").until("runs").send(signal.SIGTERM).until_told("once more stops now")
    playing.send(signal.SIGTERM).until("not listening").send(signal.SIGINT)
    ended = playing.end()
    assert ended.code == ended.ending["code"] == 143
    assert "killed: SIGINT once more" in ended.err


def test_two_signals_that_are_heard_together_leave_the_limit_of_a_stop_and_not_of_a_drain(scene):
    ended = scene("two_signals_at_once").end()
    assert ended.code == ended.ending["code"] == 1
    assert "killed: SIGINT: everything was to be stopped (limit 1 s)" in ended.err


def test_L04_signals_while_everything_closes_change_nothing_about_how_it_ended(scene):
    playing = scene("closers_hang", shutdown_seconds=600.0).until("saved 0")
    playing.send(signal.SIGTERM).send(signal.SIGINT)  # two of one kind that come together would be one
    assert playing.end().code == 0  # the second cuts the closing short, which would last for ten minutes


def test_a_signal_while_everything_starts_stops_it(scene):
    ended = scene("starts").until("runs").send(signal.SIGINT).end()
    assert ended.code == ended.ending["code"] == 130
    assert ended.err == "headway: stopped by SIGINT before it had drained\n"


def test_a_wall_time_limit_drains_in_time_and_says_how_to_go_on(scene):
    ended = scene("drains", stop_before_seconds=60.0, drain_timeout_seconds=26.0, shutdown_seconds=30.0).end()  # it is asked to after 4 s
    assert ended.code == ended.ending["code"] == 143
    assert ended.ending["cause"] == "run.stop_before_seconds (60 s) is near: saved, to be taken up again with --resume"
    assert ended.seconds < 60


def test_a_wall_time_limit_stops_what_does_not_drain_before_it(scene):
    ended = scene("stop_hangs", stop_before_seconds=3.0, drain_timeout_seconds=600.0, shutdown_seconds=1.0).end()
    assert ended.code != 0
    assert "killed: run.stop_before_seconds: everything was to be stopped (limit 1.5 s)" in ended.err


def test_C10_a_loop_that_is_blocked_for_the_stall_limit_ends_the_process_with_3_and_the_line(scene):
    ended = scene("loop_blocks").end()
    assert ended.code == ended.ending["code"] == 3
    assert re.search(r"the event loop has not turned for \d+ s: it is blocked at ", ended.err)
    assert "in hold_the_loop: time.sleep(1)" in ended.ending["cause"]


def test_a_signal_to_a_blocked_loop_is_heard_and_the_drain_is_killed_at_its_limit(scene):
    ended = scene("loop_blocks", on_stall="report").until("runs").send(signal.SIGTERM).end()
    assert ended.code == ended.ending["code"] == 1
    assert "SIGTERM: the run was to drain (limit 2 s)" in ended.ending["cause"]
