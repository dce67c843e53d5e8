"""`--from-run RUN --from-batch K --until-batch K` as a person meets it: a part of a run is measured, or one line says why not."""

import json

import pytest
from run_directories import write_run
from simulations import called

from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Fixed, Lognormal
from headway.sim.engine import EngineSettings
from headway.sim.rollouts import RolloutSettings
from headway.sim.run import simulate
from headway.sim.settings import WorldSettings
from headway.sim.trainer import TrainerFault, TrainerSettings

BATCHES = 60


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose trainer took 5 s for a batch, and stood still for 30 s once, at one of the first twenty."""
    section = RolloutSection(groups_per_batch=4, group_size=2, max_concurrent=32, max_staleness=4)
    trainer = TrainerSettings(seconds=Fixed(5.0), faults=(TrainerFault(60.0, 30.0, dies=False),))
    world = WorldSettings(rollouts=RolloutSettings(seconds=Lognormal(4.0, 0.5)), engines=(EngineSettings(),), trainer=trainer)
    return write_run(tmp_path_factory.mktemp("runs") / "one", simulate(world, section, RunSection(steps=BATCHES)), section)


def trained_in(capsys, run, *options):
    code, out, err = called(capsys, "plan", "--from-run", run, "--no-simulate", "--json", *options)
    assert (code, err) == (0, "")
    return json.loads(out)["expected"]["train_seconds"]


def test_what_was_before_a_batch_is_left_out(run, capsys):
    assert trained_in(capsys, run) > 5.2
    assert trained_in(capsys, run, "--from-batch", 30) == pytest.approx(5.0, abs=0.01)
    assert trained_in(capsys, run, "--from-batch", 5, "--until-batch", 25) > 6.0


def test_simulate_takes_the_same_part(run, capsys):
    code, out, err = called(capsys, "simulate", "--from-run", run, "--from-batch", 30, "--set", "run.steps=20", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["batches_per_hour"] == pytest.approx(720, rel=0.03)


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--from-batch", BATCHES], f"--from-batch {BATCHES}: batches 0 to {BATCHES - 1} were trained"),
        (["--until-batch", BATCHES + 1], f"--until-batch {BATCHES + 1}: batches 0 to {BATCHES - 1} were trained: at most {BATCHES}"),
        (["--from-batch", 20, "--until-batch", 20], "--until-batch 20: no batch is before it and from 20 on"),
        (["--until-batch", 0], "--until-batch 0: no batch is before it and from 0 on"),
        (["--from-batch", BATCHES - 3], "in the time to be measured 3 batches and "),
        (["--from-batch", BATCHES - 1], "in the time to be measured 1 batches and "),
    ],
)
def test_a_part_that_is_not_there_or_too_small_is_told_in_one_line(run, command, options, said, capsys):
    code, out, err = called(capsys, command, "--from-run", run, *options)
    assert (code, out) == (2, "")
    assert err.startswith(f"headway: {run}: ")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize("option", ["--from-batch", "--until-batch"])
def test_a_part_of_no_run_is_refused(command, option, capsys):
    code, out, err = called(capsys, command, "--set", "workload.tokens=50", "--set", "training.seconds=1", option, 3)
    assert (code, out) == (2, "")
    assert err == f"headway: {option} is about the run that is measured: name it by --from-run RUN\n"
