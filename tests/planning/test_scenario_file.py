"""Reading scenarios: layers on top of each other, values in files of their own, what contradicts itself, what reads back."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import damaged, ended, is_one_short_line

from headway.errors import ConfigError
from headway.planning.scenario_file import load_scenario, read_values, scenario_text
from headway.sim.distributions import Empirical, Fixed, Lognormal, Mixture
from headway.sim.scenario import Failing, FleetSection, Scenario, TrainingSection, WorkloadSection

ROOT = Path(__file__).parents[2]
MINIMAL = """
[workload]
tokens = {kind = "lognormal", mean = 800, sigma = 1}
[training]
seconds = 30
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "scenario.toml"
    path.write_text(MINIMAL)
    return path


def lines(path, *overrides, base=None):
    """Return what a scenario is refused with."""
    with pytest.raises(ConfigError) as caught:
        load_scenario(path, overrides, base)
    return [str(caught.value), *caught.value.detail.splitlines()]


def refusal(path, *overrides, base=None):
    (line,) = lines(path, *overrides, base=base)
    return line


def test_a_minimal_scenario_takes_every_default(file):
    scenario = load_scenario(file)
    assert scenario.workload.tokens == Lognormal(800, 1)
    assert scenario.fleet == FleetSection()
    assert scenario.training.seconds == 30


@pytest.mark.parametrize("path", sorted((ROOT / "examples/scenarios").glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_read_back_from_what_is_saved_of_them(path, tmp_path):
    scenario = load_scenario(path)
    (tmp_path / "saved.toml").write_text(scenario_text(scenario))
    assert load_scenario(tmp_path / "saved.toml") == scenario


# ---- layers


def test_overrides_are_enough(file):
    written = load_scenario(None, ['workload.tokens={kind = "lognormal", mean = 800, sigma = 1}', "training.seconds=30"])
    assert written == load_scenario(file)


def test_a_field_of_a_distribution_can_be_changed_alone(file):
    assert load_scenario(file, ["workload.tokens.sigma=2"]).workload.tokens == Lognormal(800, 2)
    assert refusal(file, "workload.tokens.sigma=-2").startswith("--set: workload.tokens.sigma is -2: ")
    assert load_scenario(file, ["workload.tokens=300"]).workload.tokens == 300
    assert "its kind is missing" in refusal(file, "workload.prompt_tokens.mean=3")


def test_a_kind_that_is_given_replaces_the_whole_distribution(file):
    assert load_scenario(file, ['workload.tokens={kind = "fixed", value = 3}']).workload.tokens == Fixed(3)
    assert len(lines(file, "workload.tokens.kind=pareto")) == 2  # mean and shape: nothing is left of the other kind


def test_a_length_in_the_other_unit_takes_the_place_of_the_one_below(file):
    assert load_scenario(file, ["workload.seconds=20"]).workload == WorkloadSection(seconds=20)
    assert "keep one" in refusal(file, "workload.seconds=20", "workload.tokens=20")


def test_a_file_and_overrides_lie_on_top_of_what_was_measured(file):
    measured = Scenario(
        workload=WorkloadSection(seconds=Empirical((1.0, 2.0)), turns=3, failures=(Failing(cause="timeout", share=0.1),)),
        training=TrainingSection(seconds=Lognormal(5, 0.1), jitter=0.2),
    )
    assert load_scenario(None, (), measured) == measured
    over = load_scenario(None, ["training.seconds.mean=6", "fleet.engines=4"], measured)
    assert over.training == TrainingSection(seconds=Lognormal(6, 0.1), jitter=0.2)
    assert over.fleet.engines == 4
    both = load_scenario(file, (), measured)
    assert both.workload.tokens == Lognormal(800, 1)
    assert both.workload.seconds is None
    assert (both.workload.turns, both.workload.failures) == (3, measured.workload.failures)
    assert (both.training.seconds, both.training.jitter) == (30, 0.2)


def test_a_contradiction_names_the_place_that_set_the_key(file):
    assert refusal(file, "rollout.max_concurrent=4").startswith("--set: rollout.max_concurrent is 4: at least rollout.group_size (8)")
    assert refusal(file, 'faults=[{at_seconds = 3, what = "engine_dies", engine = 1}]').startswith("--set: faults[0].engine is 1: ")
    file.write_text(MINIMAL + "[rollout]\nmax_concurrent = 4\n")
    assert refusal(file).startswith(f"{file}: rollout.max_concurrent is 4: ")


# ---- values in files


def test_measured_values_may_lie_in_a_file_beside_the_scenario(file, monkeypatch):
    (file.parent / "latencies.csv").write_text("# seconds\n21.5\n\n30\n 28.9 \n")
    file.write_text('[workload]\nseconds = {kind = "empirical", file = "latencies.csv"}\n[training]\nseconds = 30\n')
    assert load_scenario(file).workload.seconds == Empirical((21.5, 30.0, 28.9))
    monkeypatch.chdir(file.parent)
    part = '{kind = "mixture", parts = [[1, {kind = "empirical", file = "latencies.csv"}], [1, {kind = "fixed", value = 2}]]}'
    assert load_scenario(file, [f"workload.seconds={part}"]).workload.seconds == Mixture(
        ((1.0, Empirical((21.5, 30.0, 28.9))), (1.0, Fixed(2.0)))
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1\nseconds\n", 'line 2 is "seconds": it must be one number, 0 or more'),
        ("1\n\n-2\n", 'line 3 is "-2": it must be one number, 0 or more'),
        ("1, 2\n", 'line 1 is "1, 2": it must be one number, 0 or more'),
        ("nan\n", 'line 1 is "nan": it must be one number, 0 or more'),
        ("# nothing\n", "it holds no number"),
    ],
)
def test_a_bad_line_of_values_is_told_with_its_number(file, text, said):
    (file.parent / "values.csv").write_text(text)
    file.write_text('[workload]\nseconds = {kind = "empirical", file = "values.csv"}\n[training]\nseconds = 30\n')
    assert refusal(file) == f"{file}: workload.seconds.file: {file.parent / 'values.csv'}: {said}"


def test_a_file_of_values_that_is_missing_or_given_beside_values_is_told(file):
    assert refusal(file, 'workload.tokens={kind = "empirical", file = "none.csv"}').endswith("workload.tokens.file: none.csv: no such file")
    assert "keep one" in refusal(file, 'workload.tokens={kind = "empirical", values = [1], file = "none.csv"}')
    assert "it must name a file" in refusal(file, 'workload.tokens={kind = "empirical", file = 3}')


def test_values_read_alone(tmp_path):
    (tmp_path / "v").write_bytes(b"\xef\xbb\xbf1\r\n2.5e3\r\n")
    assert read_values(tmp_path / "v") == [1.0, 2500.0]


# ---- contradictions

NO_LENGTH = "workload.tokens is missing: how long are the rollouts?"
NO_TIME = "training.seconds is 0 and training.tokens_per_second is not set: a trainer that takes no time"


def test_an_empty_scenario_is_told_what_it_lacks(file):
    file.write_text("")
    assert refusal(file).startswith(f"{file}: {NO_LENGTH}")
    file.write_text("[workload]\ntokens = 3\n")
    assert refusal(file).startswith(f"{file}: {NO_TIME}")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.seconds=0", NO_TIME),
        ("workload.tokens=0", "workload.tokens is 0: a rollout that writes nothing"),
        ("workload.zero_advantage_share=1", "no group would ever train"),
        ("workload.filtered_share=1", "no group would ever train"),
        ('workload.failures=[{cause = "timeout", share = 0.6}, {cause = "timeout", share = 0.6}]', "the shares add up to 1.2: at most 1"),
        ('workload.failures=[{cause = "timeout", share = 1}]', "no attempt would ever finish"),
        ('workload.failures=[{cause = "stale", share = 0.1}]', 'workload.failures[0].cause is "stale": an attempt is lost to one of'),
        ("rollout.max_concurrent=7", "a group starts as a whole, so none ever could"),
        ("rollout.steps_ahead=9", "at most rollout.max_staleness (8)"),
        ("rollout.batch_tokens=1000", "rollout.max_rollout_tokens is 0: rollout.batch_tokens needs it"),
        ("workload.seconds=4000", "rollout.timeout_seconds is 3600.0: no rollout would end in time: one is written on for 4,000 s"),
        ("rollout.filter=mine:keep", "a simulation runs no code of yours: set workload.filtered_share instead"),
        ("rollout.advantage=grop", "rollout.advantage is"),
        ("fleet.kv_tokens=1000", "the average rollout has 1056 tokens with its prompt and must fit alone"),
        ("budget.sequences_per_engine=4", "1 engine holds 4 rollouts then, less than a group"),
        ("budget.head_coverage=1", "no plan covers them all"),
        ("run.warm_up=200", "it must be below run.steps (200)"),
        ('faults=[{at_seconds = 3, what = "engine_dies", engine = 1}]', "faults[0].engine is 1: there is no such engine"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused_in_one_line(file, override, said):
    assert said in refusal(file, override)


def test_a_cache_that_no_sync_leaves_is_refused_by_the_scenarios_own_key(file):
    line = refusal(file, "fleet.recompute_kv=false", "fleet.weight_sync=wait")
    assert line.startswith("--set: fleet.recompute_kv is false: ")
    assert "engine." not in line


def test_rollouts_of_a_largest_length_must_fit_an_engine(file):
    override = 'workload.tokens={kind = "uniform", low = 10, high = 2000}'
    assert "the longest rollout has 2256 tokens" in refusal(file, override, "fleet.kv_tokens=2000")
    assert load_scenario(file, [override, "fleet.kv_tokens=2256"]).fleet.kv_tokens == 2256


def test_groups_of_one_and_advantages_of_ones_own_can_be_simulated(file):
    assert load_scenario(file, ["rollout.group_size=1"]).rollout.group_size == 1
    assert load_scenario(file, ["rollout.advantage=mine:advantage"]).rollout.advantage == "mine:advantage"


def test_all_contradictions_are_told_at_once(file):
    assert len(lines(file, "run.warm_up=200", "training.seconds=0", "rollout.max_concurrent=1")) == 3


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@settings(max_examples=100, deadline=None)
@given(data=damaged((ROOT / "examples/scenarios/agent.toml").read_bytes()))
def test_any_file_is_a_scenario_or_is_refused_in_one_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("scenario") / "scenario.toml"
    path.write_bytes(data)
    scenario = ended(load_scenario, path)
    if isinstance(scenario, ConfigError):
        assert is_one_short_line(scenario)
        assert str(scenario).startswith(str(path))
    else:
        path.write_text(scenario_text(scenario))
        assert load_scenario(path) == scenario


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text(max_size=20).map(lambda text: f"workload.tokens={text}") | st.sampled_from(["workload=3", "faults=[3]", "a.b=1", "="]))
)
def test_any_override_is_taken_or_refused_in_one_line(overrides):
    scenario = ended(load_scenario, None, ["training.seconds=1", *overrides])
    assert isinstance(scenario, Scenario) or is_one_short_line(scenario)
