"""Edges of a plan: what it takes where nothing meets the aims, worlds too slow to be played, simulations shorter than their pipeline."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from headway.errors import ConfigError
from headway.planning.advice import recommend
from headway.planning.confirm import disagreements, simulated
from headway.planning.expected import expect
from headway.planning.plan_text import plan_text
from headway.planning.scenario_file import load_scenario


def test_a_trainer_that_would_take_years_for_a_batch_is_refused() -> None:
    said = r"training.tokens_per_second is 1e-12: a batch would take 9\.11e\+16 seconds, at most 10,000,000"
    with pytest.raises(ConfigError, match=said):
        load_scenario(None, ["workload.tokens=100", "training.tokens_per_second=1e-12"])


def test_what_it_would_take_is_something_that_may_be_set() -> None:
    world = ['workload.tokens={kind = "lognormal", mean = 100, sigma = 1}', "training.seconds=1", "budget.max_staleness=4"]
    with pytest.raises(ConfigError, match="it takes max_staleness") as refusal:
        recommend(load_scenario(None, world), None)
    bound = re.search(r"max_staleness (\d+) or|takes max_staleness (\d+)", str(refusal.value))
    assert bound is not None
    wanted = int(bound[1] or bound[2])
    wider = load_scenario(None, [*world[:2], f"budget.max_staleness={wanted}"])
    assert recommend(wider, None).choice.max_staleness <= wanted


def test_no_bound_is_advised_that_a_scenario_refuses() -> None:
    world = ['workload.tokens={kind = "pareto", mean = 100, shape = 1.2}', "training.seconds=0.1", "budget.max_staleness=400"]
    with pytest.raises(ConfigError) as refusal:
        recommend(load_scenario(None, world), None)
    assert all(int(found) <= 1024 for found in re.findall(r"takes max_staleness (\d+)", str(refusal.value)))


def test_a_confirmation_is_longer_than_its_pipeline() -> None:
    scenario = load_scenario(None, ["workload.tokens=100", "training.seconds=0.1", "run.steps=10", "rollout.max_concurrent=10000"])
    plan = recommend(scenario, simulated)
    assert plan.simulated is not None
    assert plan.simulated.batches_per_hour == pytest.approx(plan.expected.batches_per_hour, rel=0.1)
    assert plan.simulated.batches >= 20


def test_a_rate_is_written_alike_in_the_table_and_below_it() -> None:
    scenario = load_scenario(None, ["workload.tokens=100", "training.seconds=0.1", "run.steps=60", "rollout.max_concurrent=100"])
    plan = recommend(scenario, simulated)
    assert plan.simulated is not None
    half = msgspec.structs.replace(expect(scenario), batches_per_hour=plan.simulated.batches_per_hour / 2)
    line = disagreements(half, plan.simulated)[0]
    figure = re.search(r"([\d,.]+) simulated", line)
    assert figure is not None
    assert f" {figure[1]}\n" in plan_text("x", scenario, plan)


def test_a_directory_named_as_a_scenario_is_not_to_be_removed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_scenario(tmp_path)
    assert str(refusal.value) == f"{tmp_path}: a directory, and cannot be read as a scenario: name a file"
