"""What a config that is judged brings into the world that it is judged in: its own knobs and evaluations, and words for what gets lost."""

import json

import msgspec
import pytest

from headway.config import load_config
from headway.planning.config_knobs import under
from headway.settings import RolloutSection
from headway.sim.scenario import EvaluationSection, FleetSection, Scenario, TrainingSection, WorkloadSection

CONFIG = """
[model]
path = "."
[prompts]
source = "prompts.jsonl"
[environment]
entry = "mine:attempt"
[rollout]
groups_per_batch = 64
max_staleness = 4
"""
EVALUATIONS = """
[eval]
every = 5
prompts = "{prompts}"
limit = {limit}
n = 4
hold_seconds = 7
at_start = true
"""
WORLD = Scenario(
    workload=WorkloadSection(tokens=100),
    training=TrainingSection(seconds=10),
    fleet=FleetSection(engines=3, tokens_per_second=70),
    rollout=RolloutSection(groups_per_batch=8),
)


@pytest.fixture
def judged(tmp_path):
    """What becomes of a world under a config with such evaluations, and the notes; `rows` prompts lie beside it, in held_out.jsonl."""

    def judge(prompts="held_out.jsonl", *, limit=0, rows=12, world=WORLD, more=""):
        (tmp_path / "held_out.jsonl").write_text("".join(json.dumps({"prompt": str(row)}) + "\n" for row in range(rows)))
        (tmp_path / "run.toml").write_text(CONFIG + more + (EVALUATIONS.format(prompts=prompts, limit=limit) if prompts else ""))
        notes = []
        return under(world, load_config(tmp_path / "run.toml"), notes), notes

    return judge


def test_the_knobs_are_the_configs_and_the_world_stays(judged):
    scenario, notes = judged(prompts="", more='[engine]\nlaunch = "none"\nurls = ["http://one:1", "http://two:2"]\nweight_sync = "wait"\n')
    assert scenario.rollout.groups_per_batch == 64
    assert (scenario.fleet.engines, scenario.fleet.weight_sync, scenario.fleet.tokens_per_second) == (2, "wait", 70)
    assert (scenario.workload, scenario.training, scenario.eval) == (WORLD.workload, WORLD.training, None)
    assert notes == []


@pytest.mark.parametrize(("limit", "prompts"), [(0, 12), (5, 5), (100, 12)])
def test_evaluations_are_as_large_as_the_file_and_its_limit(judged, limit, prompts):
    scenario, notes = judged(limit=limit)
    assert scenario.eval == EvaluationSection(every=5, prompts=prompts, n=4, hold_seconds=7, at_start=True)
    assert notes == []


HELD = msgspec.structs.replace(WORLD, eval=EvaluationSection(prompts=33, every=2))


@pytest.mark.parametrize(
    ("source", "rows", "limit", "world", "prompts", "said"),
    [
        ("mine:held_out", 12, 0, HELD, 33, "is code of yours, which is not called here: 33, as in the world"),
        ("mine:held_out", 12, 20, HELD, 20, "which is not called here: 20, as in the world"),
        ("mine:held_out", 12, 20, WORLD, 20, "which is not called here: 20, as many as eval.limit allows"),
        ("mine:held_out", 12, 0, WORLD, None, "there are no evaluations: --set eval.prompts=N says it"),
        ("missing.jsonl", 12, 0, HELD, 33, "missing.jsonl does not exist"),
        ("held_out.jsonl", 0, 20, WORLD, 20, "held_out.jsonl is empty: 20, as many as"),
    ],
)
def test_how_many_prompts_there_are_is_assumed_where_no_file_tells_and_said(judged, source, rows, limit, world, prompts, said):
    scenario, notes = judged(source, rows=rows, limit=limit, world=world)
    assert (scenario.eval.prompts if scenario.eval else None) == prompts
    assert scenario.eval is None or (scenario.eval.every, scenario.eval.n) == (5, 4)
    [note] = notes
    assert note.startswith("eval")
    assert said in note
    assert "\n" not in note


def test_a_config_without_evaluations_has_none_in_any_world(judged):
    scenario, notes = judged(prompts="", world=HELD)
    assert scenario.eval is None
    assert notes == ["eval: the config has none, whatever the world that is planned for has"]


def test_what_a_scenario_does_not_know_of_a_config_is_told(judged):
    more = 'filter = "mine:keep"\nsteps_ahead = 3\n[trainer]\npublish_every = 3\n[ingest]\n'
    scenario, notes = judged(prompts="", more=more)
    assert scenario.rollout.filter == ""
    assert [note.partition(":")[0].partition(" ")[0] for note in notes] == ["rollout.filter", "rollout", "trainer.publish_every"]
