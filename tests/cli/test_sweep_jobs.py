"""`headway simulate --sweep --jobs`: several processes simulate the points, to the same result; none of them is left, whatever happens."""

import asyncio
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys

import msgspec
import psutil
import pytest
from ended_processes import has_ended
from simulations import simulated, tiny
from terminals import ctrl_c_is_heard, rest_of

from headway.cli.sweep_apart import simulate_apart
from headway.cli.sweep_process import LENGTH, Answer, Ask, Came, Failed, Trained, answered, frame, serve
from headway.planning.draw_timeline import last_batches
from headway.planning.scenario_file import load_scenario
from headway.planning.sweep import parse_sweep, points_of
from headway.sim.figures import summarise, timeline
from headway.sim.play import play

LIMIT = 300.0
ENDLESS = 9_000_000  # batches


@pytest.fixture
def file(tmp_path):
    return tiny(tmp_path, "timeout_seconds = 0", steps=8)


def frames(data):
    """The answers in what a process wrote."""
    stream, found = io.BytesIO(data), []
    while head := stream.read(LENGTH.size):
        found.append(msgspec.msgpack.decode(stream.read(*LENGTH.unpack(head)), type=Answer))
    return found


def test_a_process_answers_one_question_after_the_other(file):
    scenario = load_scenario(file)
    impossible = load_scenario(file, ["workload.zero_advantage_share=0.9999999"])
    asks = [
        Ask(scenario, cohorts=False, timeline=True),
        Ask(impossible, cohorts=False, timeline=False),
        Ask(scenario, cohorts=True, timeline=True),
    ]
    out = io.BytesIO()
    serve(io.BytesIO(b"".join(map(frame, asks))), out)
    first, second, third = [answer for answer in frames(out.getvalue()) if not isinstance(answer, Trained)]
    played = play(scenario)
    assert first == Came(summarise(played), last_batches(timeline(played)))
    assert isinstance(second, Failed)
    assert second.problem
    assert "\n" not in second.problem
    assert isinstance(third, Came)
    assert (third.summary.by, list(third.intervals)) == ("cohorts", [])


def test_it_says_how_far_it_is(file):
    told: list[Answer] = []
    came = answered(Ask(load_scenario(file, ["run.steps=600"]), cohorts=False, timeline=False), told.append)
    assert isinstance(came, Came)
    assert came.intervals == ()
    counts = [each.batches for each in told if isinstance(each, Trained)]
    assert counts == sorted(counts)
    assert all(0 < count <= 600 for count in counts)


@pytest.mark.e2e
@pytest.mark.parametrize("more", [[], ["--cohorts"]])
def test_many_processes_come_to_what_one_comes_to(file, tmp_path, capsys, more):
    grid = ["--sweep", "max_staleness=1,2,4", "steps_ahead=1,2", "workload.zero_advantage_share=0,0.5"]
    one = simulated(capsys, file, *more, *grid, "--out", tmp_path / "one")
    several = simulated(capsys, file, *more, *grid, "--out", tmp_path / "several", "--jobs", "3")
    assert several[:2] == one[:2]
    assert sorted(several[2].splitlines()) == sorted(one[2].splitlines())  # told as they come
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "several" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.e2e
def test_a_point_that_fails_is_told_and_ends_with_exit_code_1(file, capsys):
    code, out, err = simulated(capsys, file, "--json", "--jobs", "2", "--sweep", "workload.zero_advantage_share=0.9999999,0")
    assert code == 1
    assert err.startswith("headway: --sweep: workload.zero_advantage_share=0.9999999: ")
    assert err.count("\n") == 1
    assert [row["summary"] is None for row in json.loads(out)] == [True, False]


@pytest.mark.e2e
def test_a_process_that_dies_costs_the_point_that_it_had(file):
    """One process for three points; it is killed in the first, which would take for ever."""
    points = points_of(load_scenario(file), parse_sweep([f"run.steps={ENDLESS},8,9"]))
    found, killed = {}, []

    def told(trained):
        for child in psutil.Process().children() if trained and not killed else ():
            if "headway.cli.sweep_process" in child.cmdline():
                killed.append(child)
                child.kill()

    asyncio.run(simulate_apart(points, 1, cohorts=False, timelines=0, found=found.__setitem__, told=told))
    assert found[0].problem == "the process that simulated it was killed (SIGKILL)"
    assert [found[number].summary.batches for number in (1, 2)] == [8, 9]
    assert all(map(has_ended, killed))


@pytest.mark.e2e
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nobody_is_left_and_ctrl_c_keeps_the_points_that_are_done(file, tmp_path, number):
    """The second and the third point would take for ever; both have begun once the line has counted more than the first has."""
    terminal, theirs = pty.openpty()
    out = tmp_path / "results"
    grid = ["--sweep", f"run.steps=8,{ENDLESS},{ENDLESS + 1}", "--jobs", "2", "--out", str(out)]
    command = [sys.executable, "-m", "headway", "simulate", str(file), *grid]
    with ctrl_c_is_heard(), subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown, children = b"", []
        try:
            while not any(int(count.replace(b",", b"")) > 8 for count in re.findall(rb"simulating: ([\d,]+) of", shown)):
                shown += os.read(terminal, 4096)
            children = psutil.Process(process.pid).children()
            process.send_signal(number)
            assert process.wait(LIMIT) == (130 if number == signal.SIGINT else -signal.SIGKILL)
            psutil.wait_procs(children, LIMIT)
            assert len(children) == 2
            assert all(map(has_ended, children))
        finally:
            process.kill()
            for child in children:
                if not has_ended(child):
                    child.kill()
        assert process.stdout is not None
        printed = process.stdout.read()
    shown += rest_of(terminal)
    assert b"Traceback" not in shown
    if number == signal.SIGINT:
        assert printed.startswith(b"tiny: 1 of 3 points (virtual loop)\n")
        assert shown.rstrip().endswith(f"headway: interrupted after 1 of 3 points: they are in {out}".encode())


def test_jobs_without_a_sweep_are_refused(file, capsys):
    code, out, err = simulated(capsys, file, "--jobs", "2")
    assert (code, out, err) == (2, "", "headway: --jobs is of a --sweep: one scenario is simulated by one process\n")
