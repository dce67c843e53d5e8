"""Batches that are sized by tokens: admission counts on the smallest, closed forms know it."""

from __future__ import annotations

import pytest

from headway.planning.advice import recommend
from headway.planning.confirm import simulated
from headway.planning.expected import expect
from headway.planning.scenario_file import load_scenario
from headway.sim.scenario import Scenario

_WORLD = (
    'workload.tokens={kind = "lognormal", mean = 1500, sigma = 0.5}',
    "fleet.engines=4",
    "fleet.half_speed_at=48",
    "fleet.tokens_per_second=70",
    "training.seconds=15",
    "rollout.group_size=8",
    "rollout.batch_tokens=300000",
    "rollout.max_staleness=16",
    "rollout.max_concurrent=768",
    "run.steps=40",
)


def _world(longest: int, ahead: int) -> Scenario:
    return load_scenario(None, [*_WORLD, f"rollout.max_rollout_tokens={longest}", f"rollout.steps_ahead={ahead}"])


@pytest.mark.parametrize(("longest", "ahead"), [(2000, 2), (2000, 8), (3000, 8), (6000, 2), (6000, 8), (20_000, 8)])
def test_the_gate_lets_fewer_groups_live_where_the_smallest_batch_is_far_below_the_usual_one(longest: int, ahead: int) -> None:
    scenario = _world(longest, ahead)
    expected, summary = expect(scenario), simulated(scenario)
    assert summary is not None
    assert expected.batches_per_hour == pytest.approx(summary.batches_per_hour, rel=0.2)
    assert expected.mean_staleness == pytest.approx(summary.staleness.mean, abs=0.5)


def test_steps_ahead_makes_up_for_it_where_max_staleness_allows() -> None:
    near, far = (recommend(_world(longest, 2), None) for longest in (2000, 3000))
    assert float(far.choice.steps_ahead) > float(near.choice.steps_ahead)
    assert far.expected.batches_per_hour == pytest.approx(near.expected.batches_per_hour, rel=0.05)
