"""Plans for rollouts that are with their environments most of the time: those take no place at an engine."""

from __future__ import annotations

import pytest

from headway.planning.advice import recommend
from headway.planning.confirm import simulated
from headway.planning.expected import expect
from headway.planning.judge import judge
from headway.planning.scenario_file import load_scenario

_WORLD = (
    'workload.tokens={kind = "lognormal", mean = 1000, sigma = 0.5}',
    "workload.turns=10",
    "fleet.engines=8",
    "fleet.tokens_per_second=60",
    "fleet.half_speed_at=32",
    "training.seconds=23",
    "rollout.timeout_seconds=0",
)


def test_rollouts_that_wait_for_tools_do_not_fill_the_engines() -> None:
    quick = recommend(load_scenario(None, list(_WORLD)), None)
    slow = recommend(load_scenario(None, [*_WORLD, "workload.tool_seconds=20"]), None)
    assert slow.expected.trainer_busy == pytest.approx(quick.expected.trainer_busy, abs=0.02)  # engines write as much
    assert slow.choice.max_concurrent > 2 * quick.choice.max_concurrent


def test_what_such_a_plan_promises_is_what_a_simulation_finds() -> None:
    world = [*_WORLD, "workload.tool_seconds=20", "rollout.groups_per_batch=16", "run.steps=40"]
    plan = recommend(load_scenario(None, world), simulated)
    assert plan.simulated is not None
    assert plan.simulated.batches_per_hour == pytest.approx(plan.expected.batches_per_hour, rel=0.05)
    assert plan.simulated.trainer_busy > 0.9


def test_a_plan_does_not_find_its_own_max_concurrent_too_small() -> None:
    world = load_scenario(None, [*_WORLD, "workload.tool_seconds=20", "fleet.engines=1"])
    plan = recommend(world, None)
    assert "too few" not in plan.binding
    knobs = [f"rollout.{key}={getattr(plan.choice, key)}" for key in ("max_staleness", "steps_ahead", "max_concurrent")]
    as_planned = load_scenario(None, [*_WORLD, "workload.tool_seconds=20", "fleet.engines=1", *knobs])
    verdicts = judge(as_planned, None).verdicts
    assert "max_concurrent" not in [verdict.key for verdict in verdicts]
    assert expect(as_planned).binding == "engines"


def test_a_budget_of_sequences_is_named_where_it_binds() -> None:
    plan = recommend(load_scenario(None, [*_WORLD, "workload.tool_seconds=20", "budget.sequences_per_engine=100"]), None)
    assert plan.choice.max_concurrent <= 800
    assert "budget.sequences_per_engine 100" in plan.binding
