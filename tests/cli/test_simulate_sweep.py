"""`headway simulate --sweep` and `--cohorts` as a person meets them: what is printed, saved, refused, and kept after Ctrl-C."""

import csv
import json
import os
import pty
import re
import signal
import subprocess
import sys

import msgspec
import pytest
from simulations import simulated, tiny
from terminals import ctrl_c_is_heard, rest_of

from headway.planning.pictures import MISSING
from headway.planning.scenario_file import load_scenario
from headway.sim.summary import Summary

TABLES = {"scenario.toml", "report.txt", "sweep.csv", "sweep.parquet", "sweep.html"}


@pytest.fixture
def file(tmp_path):
    return tiny(tmp_path, "timeout_seconds = 0", steps=8)


def rows_of(directory):
    with (directory / "sweep.csv").open(newline="") as table:
        return list(csv.DictReader(table))


def test_a_sweep_is_a_table_and_a_directory_of_results(file, tmp_path, capsys):
    out = tmp_path / "results"
    code, printed, err = simulated(capsys, file, "--sweep", "max_staleness=1,4", "--out", out)
    assert (code, err) == (0, "")
    assert printed.startswith("tiny: 2 points (virtual loop)\n")
    pictures = {f"{name}-{kind}.png" for name in ("frontier", "staleness", "timeline") for kind in ("light", "dark")}
    assert {path.name for path in out.iterdir()} == TABLES | pictures
    assert (out / "sweep.html").read_text().count("<img ") == 3
    assert (out / "report.txt").read_text() == printed
    assert load_scenario(out / "scenario.toml") == load_scenario(file)
    assert [row["rollout.max_staleness"] for row in rows_of(out)] == ["1", "4"]


def test_keys_of_a_grid_may_follow_each_other(file, capsys):
    arguments = ["--cohorts", "--json", "--sweep", "max_staleness=1,4"]
    _, quoted, _ = simulated(capsys, file, "--cohorts", "--json", "--sweep", "max_staleness=1,4 steps_ahead=0.5,1")
    for words in ([file, *arguments, "steps_ahead=0.5,1"], [*arguments, "steps_ahead=0.5,1", file]):
        assert simulated(capsys, *words) == (0, quoted, "")


def test_a_file_may_have_the_name_of_a_key(file, monkeypatch, capsys):
    monkeypatch.chdir(file.parent)
    file.rename("seed=1")
    code, out, _ = simulated(capsys, "seed=1", "--cohorts", "--json", "--sweep", "max_staleness=1,4")
    assert (code, len(json.loads(out))) == (0, 2)


def test_a_point_comes_to_what_the_same_scenario_alone_comes_to(file, capsys):
    _, alone, _ = simulated(capsys, file, "--set", "rollout.max_staleness=1", "--json")
    code, out, _ = simulated(capsys, file, "--sweep", "max_staleness=1,4", "--json")
    assert code == 0
    first, second = json.loads(out)
    assert (first["point"], second["point"]) == ({"rollout.max_staleness": 1}, {"rollout.max_staleness": 4})
    assert first["summary"] == json.loads(alone)


def test_cohorts_simulate_one_scenario_and_a_grid(file, tmp_path, capsys):
    code, out, err = simulated(capsys, file, "--cohorts", "--json")
    assert (code, err) == (0, "")
    summary = msgspec.json.decode(out, type=Summary)
    assert summary.by == "cohorts"
    code, out, _ = simulated(capsys, file, "--cohorts", "--json", "--sweep", "run.seed=0,1")
    assert code == 0
    assert msgspec.convert(json.loads(out)[0]["summary"], Summary, strict=False) == summary


def test_cohorts_save_no_timeline(file, tmp_path, capsys):
    out = tmp_path / "results"
    assert simulated(capsys, file, "--cohorts", "--out", out)[0] == 0
    assert not [path for path in out.iterdir() if "timeline" in path.name]
    assert (out / "report.html").read_text().count("<img ") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sweep", "max_stalenes=1,2"], "--sweep: rollout.max_stalenes: no such key; did you mean rollout.max_staleness?"),
        (["--cohorts", "--set", "fleet.half_speed_at=8"], "the cohort stepper cannot do this scenario: engines that slow down with load"),
        (["--cohorts", "--sweep", "fleet.half_speed_at=8"], "--sweep: fleet.half_speed_at=8: the cohort stepper cannot do this: engines"),
        (["--sweep", "workload.tokens=5,[1"], '--sweep: workload.tokens: "[1" is not valid TOML: Unclosed array'),
        (["steps_ahead=1,2"], 'simulate: "steps_ahead=1,2" is one argument too many: other keys of a grid go behind --sweep'),
        (["another.toml"], 'simulate: "another.toml" is one argument too many, one scenario at a time'),
        (["--sweep", "max_staleness=1", "--sweep", "steps_ahead=2"], "--sweep: max_staleness=1 steps_ahead=2: rollout.steps_ahead is 2.0"),
    ],
)
def test_what_cannot_be_simulated_is_one_line_and_exit_code_2(file, arguments, said, tmp_path, capsys):
    code, out, err = simulated(capsys, file, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"headway: {said}")
    assert err.count("\n") == 1


def test_a_mistake_leaves_no_directory(file, tmp_path, capsys):
    assert simulated(capsys, file, "--sweep", "max_stalenes=1", "--out", tmp_path / "results")[0] == 2
    assert not (tmp_path / "results").exists()


def test_a_point_that_contradicts_is_told_and_the_others_are_simulated(file, capsys):
    code, out, err = simulated(capsys, file, "--cohorts", "--json", "--sweep", "max_staleness=1,2 steps_ahead=2")
    assert code == 0
    assert err.startswith("headway: --sweep: max_staleness=1 steps_ahead=2: rollout.steps_ahead is 2.0: at most")
    assert err.count("\n") == 1
    assert [row["summary"] is None for row in json.loads(out)] == [True, False]


def test_a_point_in_which_nothing_trains_is_told_and_the_exit_code_is_1(file, capsys):
    code, out, err = simulated(capsys, file, "--json", "--sweep", "workload.zero_advantage_share=0.9999999,0")
    assert code == 1
    assert err.startswith("headway: --sweep: workload.zero_advantage_share=0.9999999: ")
    assert "Traceback" not in err
    assert [row["summary"] is None for row in json.loads(out)] == [True, False]


@pytest.mark.e2e
def test_without_matplotlib_tables_are_written_and_one_line_says_what_is_missing(file, tmp_path):
    out = tmp_path / "results"
    without = "import sys; sys.modules['matplotlib'] = None; from headway.cli import command_line; sys.exit(command_line(sys.argv[1:]))"
    command = [sys.executable, "-c", without, "simulate", str(file), "--cohorts", "--sweep", "max_staleness=1,4", "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, f"headway: {MISSING}\n")
    assert "pip install 'headway[pictures]'" in MISSING
    assert {path.name for path in out.iterdir()} == TABLES
    assert "headway[pictures]" in (out / "sweep.html").read_text()


@pytest.mark.e2e
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_ctrl_c_keeps_the_points_that_are_done(file, tmp_path):
    """It waits for the progress line of the second point, which would take for ever."""
    terminal, theirs = pty.openpty()
    out = tmp_path / "results"
    command = [sys.executable, "-m", "headway", "simulate", str(file), "--sweep", "run.steps=8,1000000", "--out", str(out)]
    with ctrl_c_is_heard(), subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while not any(int(count.replace(b",", b"")) > 8 for count in re.findall(rb"simulating: ([\d,]+) of 1,000,008 batches", shown)):
                shown += os.read(terminal, 4096)
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 130
        finally:
            process.kill()
        assert process.stdout is not None
        assert process.stdout.read().startswith(b"tiny: 1 of 2 points (virtual loop)\n")
    shown += rest_of(terminal)
    assert shown.rstrip().endswith(f"headway: interrupted after 1 of 2 points: they are in {out}".encode())
    assert b"Traceback" not in shown
    (row,) = rows_of(out)
    assert (row["run.steps"], row["batches"]) == ("8", "8")
    assert {path.name for path in out.iterdir()} >= TABLES
