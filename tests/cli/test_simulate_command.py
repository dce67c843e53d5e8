"""`headway simulate` as a person meets it: what is printed, what is saved, what is refused, how it is interrupted."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from run_directories import write_run
from simulations import simulated, tiny
from terminals import ctrl_c_is_heard, rest_of

from headway.cli import command_line
from headway.cli.reference import scenario_reference
from headway.planning.scenario_file import SCENARIO, load_scenario
from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Fixed, Lognormal
from headway.sim.engine import EngineSettings
from headway.sim.rollouts import RolloutSettings
from headway.sim.run import simulate
from headway.sim.settings import WorldSettings
from headway.sim.summary import Interval, Summary
from headway.sim.trainer import TrainerSettings

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples/scenarios").glob("*.toml"))
FILES = {"scenario.toml", "report.txt", "report.html", "summary.json", "timeline.json"}


@pytest.fixture
def file(tmp_path):
    return tiny(tmp_path, "max_staleness = 1", steps=20)


def test_a_report_is_plain_text_for_80_columns(file, capsys):
    code, out, err = simulated(capsys, file)
    assert (code, err) == (0, "")
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith("tiny: 18 batches in ")
    assert "max_staleness = 1" in out
    assert "masked: in a trained batch, too old to be in its loss" in out


def test_figures_as_json_are_a_summary_and_the_same_every_time(file, capsys):
    code, out, _ = simulated(capsys, file, "--json")
    assert code == 0
    assert msgspec.json.decode(out, type=Summary).batches == 18
    assert simulated(capsys, file, "--json")[1] == out
    assert simulated(capsys, file, "--json", "--set", "run.seed=1")[1] != out


def test_overrides_alone_are_a_scenario(capsys):
    code, out, _ = simulated(capsys, "--set", "workload.tokens=50", "--set", "training.seconds=1", "--set", "run.steps=2")
    assert code == 0
    assert out.startswith("scenario: ")


def test_what_is_saved_is_all_of_it_and_can_be_simulated_again(file, tmp_path, capsys):
    out = tmp_path / "deep" / "results"
    _, printed, _ = simulated(capsys, file, "--out", out, "--set", "run.seed=7")
    pictures = {f"{name}-{kind}.png" for name in ("staleness", "timeline", "lengths") for kind in ("light", "dark")}
    assert {path.name for path in out.iterdir()} == FILES | pictures
    assert (out / "report.txt").read_text() == printed
    assert load_scenario(out / "scenario.toml") == load_scenario(file, ["run.seed=7"])
    intervals = msgspec.json.decode((out / "timeline.json").read_bytes(), type=list[Interval])
    assert {each.who for each in intervals} == {"trainer", "engine-0", "gate"}
    assert simulated(capsys, out / "scenario.toml", "--json")[1] == (out / "summary.json").read_text()


def test_nothing_is_overwritten(file, tmp_path, capsys):
    results = tmp_path / "results"
    results.mkdir()
    (results / "mine").write_text("")
    code, out, err = simulated(capsys, file, "--out", results)
    assert (code, out) == (2, "")
    assert err == f"headway: --out: {results} is not empty, and nothing is overwritten: name another directory, or remove it\n"
    code, _, err = simulated(capsys, file, "--out", results / "mine")
    assert code == 2
    assert err.startswith(f"headway: --out: {results / 'mine'} cannot be made: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a scenario: headway simulate SCENARIO.toml"),
        (["none.toml"], "none.toml: no such file"),
        (["--from-run", "none"], "none: no such directory"),
        (["--set", "workload.tokens=3"], "a trainer that takes no time"),
        (["--set", "workload.tokens=lognormal"], 'it must be a number or a table like {kind = "lognormal", mean = 30, sigma = 1}'),
    ],
)
def test_what_cannot_be_simulated_is_one_line_and_exit_code_2(arguments, said, capsys):
    code, out, err = simulated(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err


def test_a_world_in_which_nothing_trains_ends_with_its_cause(file, capsys):
    code, _, err = simulated(capsys, file, "--set", "workload.zero_advantage_share=0.9999999")
    assert code == 1
    assert err.startswith("headway: ")
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has been: rollouts of 4 s on average, 5 s of training."""
    section = RolloutSection(groups_per_batch=4, group_size=2, max_concurrent=32, max_staleness=4)
    world = WorldSettings(
        rollouts=RolloutSettings(seconds=Lognormal(4.0, 0.5)), engines=(EngineSettings(),), trainer=TrainerSettings(seconds=Fixed(5.0))
    )
    return write_run(tmp_path_factory.mktemp("runs") / "one", simulate(world, section, RunSection(steps=60)), section)


def test_a_run_that_was_measured_is_simulated_and_what_it_does_not_tell_is_told(run, capsys):
    code, out, err = simulated(capsys, "--from-run", run, "--set", "run.steps=40")
    assert (code, err) == (0, "")
    assert out.startswith(f"{run}: 36 batches in ")
    assert "\nassumed: " in out
    figures = json.loads(simulated(capsys, "--from-run", run, "--set", "run.steps=40", "--json")[1])
    assert figures["batches_per_hour"] == pytest.approx(720, rel=0.05)


def test_keys_of_a_measured_run_can_be_changed(run, capsys):
    arguments = ["--from-run", run, "--set", "run.steps=40", "--set", "training.seconds=10", "--set", "training.jitter=0", "--json"]
    figures = json.loads(simulated(capsys, *arguments)[1])
    assert figures["batches_per_hour"] == pytest.approx(360, rel=0.01)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_run(path, capsys):
    code, out, err = simulated(capsys, path, "--json", "--set", "run.steps=4", "--set", "rollout.groups_per_batch=8")
    assert (code, err) == (0, "")
    assert json.loads(out)["batches"] == 4


@pytest.mark.e2e
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_a_long_simulation_shows_how_far_it_is_and_ctrl_c_ends_it(file):
    """It waits for the progress line, which is there while it simulates."""
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "headway", "simulate", str(file), "--set", "run.steps=1000000"]
    with ctrl_c_is_heard(), subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while b"batches, about" not in shown:
                shown += os.read(terminal, 4096)
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 130
        finally:
            process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == b""
    shown += rest_of(terminal)
    assert b"simulating: " in shown
    assert shown.rstrip().endswith(b"headway: interrupted")
    assert b"Traceback" not in shown


def test_the_scenario_reference_in_docs_is_current(capsys):
    assert command_line(["scenario-reference"]) == 0
    printed = capsys.readouterr().out
    assert printed == scenario_reference()
    assert (ROOT / "docs/reference/scenario.md").read_text(encoding="utf-8") == printed, "run `make reference`"


def test_the_scenario_reference_has_a_row_for_every_key_with_its_meaning():
    rows = scenario_reference().splitlines()
    for key in SCENARIO.keys.values():
        assert any(row.startswith(f"| `{key.name}` |") and key.description.replace("|", "\\|") in row for row in rows), key.path
    assert all(f"## {SCENARIO.heading(section)}" in rows for section in SCENARIO.sections)
