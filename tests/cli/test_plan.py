"""`headway plan`: what a person sees of a plan and of a config that is judged, and what is said of plans that cannot be."""

import pytest
from run_directories import strictly, write_run

from headway.cli import command_line
from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Fixed, Lognormal
from headway.sim.engine import EngineSettings
from headway.sim.rollouts import RolloutSettings
from headway.sim.run import simulate
from headway.sim.settings import WorldSettings
from headway.sim.trainer import TrainerSettings

COLUMNS = 96
SCENARIO = """
[workload]
seconds = {kind = "lognormal", mean = 10, sigma = 1}
[training]
seconds = 10
[rollout]
groups_per_batch = 64
group_size = 1
timeout_seconds = 0
[run]
steps = 60
"""
CONFIG = """
[model]
path = "."
[prompts]
source = "prompts.jsonl"
[environment]
entry = "mine:attempt"
[rollout]
groups_per_batch = 64
group_size = 1
max_concurrent = 512
max_staleness = 4
steps_ahead = 4
timeout_seconds = 0
advantage = "mine:advantage"
"""


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "math.toml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def planned(capsys, *arguments):
    code = command_line(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_plan_is_plain_text_that_a_config_can_be_made_of(scenario, capsys, tmp_path):
    code, out, err = planned(capsys, scenario)
    assert (code, err) == (0, "")
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= COLUMNS
    assert out.startswith("plan for math\n")
    assert "\nthe trainer binds: engines could feed 1." in out
    assert "simulated (cohorts, " in out
    assert "\nformulas and simulation agree\n" in out
    section = out[out.index("[rollout]") : out.index("\n# and")]
    chosen = tmp_path / "chosen.toml"
    chosen.write_text(SCENARIO.replace("[rollout]\ngroups_per_batch = 64\ngroup_size = 1\n", f"{section}\n"))
    assert planned(capsys, chosen, "--no-simulate")[0] == 0


def test_a_plan_as_json_is_strict_and_has_all_of_it(scenario, capsys):
    code, out, _ = planned(capsys, scenario, "--json")
    plan = strictly(out)
    assert code == 0
    assert set(plan) == {
        "choice", "binding", "expected", "simulated", "disagreements", "tried", "notes", "sensitivity", "assumed",
    }  # fmt: skip
    assert plan["choice"]["max_staleness"] == plan["simulated"]["staleness"]["max"]
    assert plan["simulated"]["masked_share"] <= 0.02
    assert {row["key"] for row in plan["sensitivity"]} >= {"max_staleness", "steps_ahead", "groups_per_batch", "engines"}


def test_batches_that_are_sized_by_tokens_are_told_by_tokens(scenario, capsys):
    _, out, _ = planned(
        capsys, scenario, "--no-simulate", *sets("rollout.batch_tokens=48_000", "rollout.max_rollout_tokens=6_000", "workload.seconds=10")
    )
    assert "\nbatch_tokens = 48000\n" in out
    assert "groups_per_batch =" not in out


def test_the_same_seed_gives_the_same_plan(scenario, capsys):
    assert planned(capsys, scenario, "--json") == planned(capsys, scenario, "--json")


def test_a_plan_by_formula_only_says_so(scenario, capsys):
    _, out, _ = planned(capsys, scenario, "--no-simulate")
    assert "by formula\n" in out
    assert "simulat" not in out.replace("by formula", "")
    assert strictly(planned(capsys, scenario, "--no-simulate", "--json")[1])["simulated"] is None


def test_set_is_enough(capsys):
    code, out, err = planned(capsys, "--no-simulate", *sets("workload.seconds=10", "training.seconds=10"))
    assert (code, err) == (0, "")
    assert "batches/hour               360.0" in out


def test_set_is_above_the_file(scenario, capsys):
    _, out, _ = planned(capsys, scenario, "--no-simulate", "--set", "training.seconds=20")
    assert "batches/hour               180.0" in out


def test_a_config_is_judged_as_it_stands_and_bad_news_are_no_failure(scenario, config, capsys):
    code, out, err = planned(capsys, scenario, "--for", config)
    assert (code, err) == (0, "")
    assert out.startswith("run.toml, as it stands\n")
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= COLUMNS
    assert "max_concurrent = 512\n" in out
    assert "the aims are NOT met; what to change" in out
    assert "max_concurrent 512 -> 80:  512 buys nothing over 80: the trainer binds" in out
    assert "steps_ahead 4 -> 2" in out
    assert "max_staleness 4 -> " in out


def test_a_judgement_as_json_says_what_to_change(scenario, config, capsys):
    judged = strictly(planned(capsys, scenario, "--for", config, "--json")[1])
    assert judged["aims_met"] is False
    assert {verdict["key"] for verdict in judged["verdicts"]} == {"max_concurrent", "steps_ahead", "max_staleness"}
    assert judged["choice"]["max_staleness"] == 4 < judged["better"]["max_staleness"]
    assert judged["better_expected"]["masked_share"] <= 0.02


def test_set_is_above_the_config_too(scenario, config, capsys):
    judged = strictly(planned(capsys, scenario, "--for", config, "--json", "--no-simulate", "--set", "rollout.max_staleness=11")[1])
    assert judged["choice"]["max_staleness"] == 11


def sets(*pairs):
    return [word for pair in pairs for word in ("--set", pair)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has been: rollouts of 4 s on average, 5 s of training."""
    section = RolloutSection(groups_per_batch=8, group_size=2, max_concurrent=64, max_staleness=4)
    world = WorldSettings(
        rollouts=RolloutSettings(seconds=Lognormal(4.0, 0.5)),
        engines=(EngineSettings(transfer_seconds=0.1),),
        trainer=TrainerSettings(seconds=Fixed(5.0)),
    )
    return write_run(tmp_path_factory.mktemp("runs") / "one", simulate(world, section, RunSection(steps=60)), section)


def test_a_run_is_measured_and_planned_for(run, capsys):
    code, out, err = planned(capsys, "--from-run", run, "--no-simulate", "--json")
    assert (code, err) == (0, "")
    plan = strictly(out)
    assert plan["expected"]["train_seconds"] == pytest.approx(5.0, rel=0.1)
    assert plan["expected"]["rollout_seconds"] == pytest.approx(4.0, rel=0.25)
    assert plan["choice"]["groups_per_batch"] == 8


def test_a_config_is_judged_by_what_a_run_measured(run, config, capsys):
    code, out, err = planned(capsys, "--from-run", run, "--for", config, "--no-simulate")
    assert (code, err) == (0, "")
    assert "groups_per_batch = 64\n" in out
    assert "buys nothing over" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "plan: name a scenario"),
        (sets("training.seconds=10"), "workload.tokens is missing"),
        (sets("workload.seconds=10", "training.seconds=-1"), "training.seconds is -1"),
        (sets("workload.seconds=10", "training.seconds=0"), "training.seconds is 0"),
        (sets("workload.seconds=inf", "training.seconds=10"), "workload.seconds"),
        (sets('workload.seconds={kind="pareto", mean=10, shape=1}', "training.seconds=10"), "the mean does not exist"),
        (sets("workload.seconds=10", "training.seconds=10", "rollout.max_concurrent=4"), "rollout.max_concurrent is 4"),
        (sets("workload.seconds=10", "training.seconds=10", "budget.sequences_per_engine=4"), "less than a group"),
        (sets("workload.seconds=10", "training.seconds=10", "rollout.max_stalenes=4"), "rollout.max_staleness"),
        (["missing.toml"], "missing.toml: no such file"),
        (["--from-run", "nowhere"], "nowhere"),
    ],
)
def test_an_impossible_plan_is_told_in_one_line(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = planned(capsys, "--no-simulate", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("headway: ")
    assert err.count("\n") == 1


def test_a_budget_that_cannot_meet_the_aims_is_told_what_it_takes(scenario, capsys):
    code, out, err = planned(capsys, scenario, "--no-simulate", "--set", "budget.max_staleness=3")
    assert (code, out) == (2, "")
    assert "of the tokens would be masked (budget.masked_share is 2.0%)" in err
    assert "it takes max_staleness " in err
    assert err.count("\n") == 1


def test_an_empty_journal_is_told_in_one_line(capsys, tmp_path):
    section = RolloutSection(groups_per_batch=2, group_size=2)
    empty = simulate(WorldSettings(rollouts=RolloutSettings()), section, RunSection(steps=1), drain_at=0.0)
    code, out, err = planned(capsys, "--from-run", write_run(tmp_path / "empty", empty, section))
    assert code != 0
    assert out == ""
    assert err.count("\n") == 1
