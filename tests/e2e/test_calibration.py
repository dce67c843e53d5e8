"""Prediction against reality, the short form: a real run is measured, and what is simulated of it holds against it.

How fast anything was is nobody's to say on a machine that others use: rates are held against each other in simulated runs
(tests/planning/test_measured.py), and in long real ones by benchmarks/calibrate.py. What holds here holds however fast the machine is.
"""

import msgspec
import numpy as np
import pytest
from real_runs import Ended
from run_directories import strictly

from headway.cli import command_line
from headway.events import EvalStarted, Finished, Published
from headway.planning.contradictions import scenario_contradictions
from headway.planning.measured import measured
from headway.reports.run_files import open_run
from headway.settings import steps_ahead
from headway.sim.figures import summarise
from headway.sim.play import play
from headway.sim.scenario import LengthSection, drawn

pytestmark = [pytest.mark.e2e, pytest.mark.torch]


@pytest.fixture(scope="module")
def found(whole_run: Ended):
    return measured(open_run(whole_run.run.directory))


def test_a_real_run_becomes_a_scenario_of_the_same_make(whole_run: Ended, found):
    run = open_run(whole_run.run.directory)
    events = list(run.events())
    finished = [event for event in events if isinstance(event, Finished) and found.since <= event.time <= found.until]
    scenario = found.scenario
    assert scenario_contradictions(scenario) == []
    assert scenario.rollout == run.rollout
    assert (scenario.fleet.engines, scenario.fleet.max_sequences) == (1, 256)
    assert drawn(scenario.workload.tokens).mean == pytest.approx(np.mean([event.sampled_tokens for event in finished]))
    assert scenario.training.seconds > 0
    syncs = [event.sync_engine_seconds for event in events if isinstance(event, Published) and found.since <= event.time <= found.until]
    assert drawn(scenario.fleet.sync_seconds).mean == pytest.approx(np.mean(syncs), rel=1e-4)
    evaluations = [event.rollouts for event in events if isinstance(event, EvalStarted) and event.time <= found.until]
    assert (scenario.eval.every, scenario.eval.n, scenario.eval.prompts) == (3, 1, np.median(evaluations))
    assert found.notes


def test_what_is_simulated_is_as_stale_as_the_real_run_was(whole_run: Ended, found):
    rows = whole_run.rows("metrics.jsonl")[-found.batches :]
    real = np.average([row["token_staleness_mean"] for row in rows], weights=[row["contributing_tokens"] for row in rows])
    staleness = summarise(play(msgspec.structs.replace(found.scenario, run=LengthSection(steps=40)))).staleness
    ahead = steps_ahead(found.scenario.rollout)
    assert staleness.max <= found.scenario.rollout.max_staleness
    for mean in (real, staleness.mean):  # which of the two is the larger says who was faster, engine or trainer
        assert 0 <= mean <= ahead + 0.5


def test_a_real_run_is_simulated_and_planned_from(whole_run: Ended, capsys):
    directory = str(whole_run.run.directory)
    assert command_line(["simulate", "--from-run", directory, "--set", "run.steps=20", "--json"]) == 0
    assert strictly(capsys.readouterr().out)["batches_per_hour"] > 0
    assert command_line(["plan", "--from-run", directory, "--no-simulate", "--json"]) == 0
    assert strictly(capsys.readouterr().out)["assumed"]
    assert command_line(["simulate", "--from-run", directory, "--set", "run.steps=20"]) == 0
    assert "assumed: fleet.kv_tokens" in capsys.readouterr().out
