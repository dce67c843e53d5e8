"""What closed forms make of weight syncs that cost something, beside the simulation: aborted rollouts, engines that run empty."""

from __future__ import annotations

import msgspec
import pytest

from headway.planning.confirm import simulated
from headway.planning.expected import expect
from headway.planning.scenario_file import load_scenario

_WORLD = (
    "fleet.tokens_per_second=70",
    "fleet.sync_seconds=3",
    "training.seconds=15",
    "rollout.groups_per_batch=16",
    "rollout.timeout_seconds=0",
)


def test_rollouts_that_are_aborted_at_a_sync_are_prefilled_again_like_those_that_go_on() -> None:
    world = [*_WORLD, "workload.tokens=1000", "fleet.prefill_tokens_per_second=4000", "rollout.max_concurrent=128"]
    goes_on, aborted = (load_scenario(None, [*world, f'fleet.weight_sync="{mode}"']) for mode in ("in_flight", "abort_resume"))
    assert expect(aborted) == expect(goes_on)
    kept = msgspec.structs.replace(goes_on, fleet=msgspec.structs.replace(goes_on.fleet, recompute_kv=False))
    assert expect(kept).batches_per_hour > 1.02 * expect(goes_on).batches_per_hour


@pytest.mark.parametrize("ahead", [4, 6, 8])
def test_engines_that_run_empty_get_faster_at_the_end_whether_all_could_start_at_once_or_not(ahead: int) -> None:
    knobs = [f"rollout.steps_ahead={ahead}", "rollout.max_staleness=16", "rollout.max_concurrent=768", "run.steps=80"]
    fleet = ["fleet.engines=4", "fleet.half_speed_at=48", 'fleet.weight_sync="wait"']
    scenario = load_scenario(None, [*_WORLD, *fleet, *knobs, 'workload.tokens={kind = "lognormal", mean = 1500, sigma = 0.8}'])
    expected, summary = expect(scenario), simulated(scenario)
    assert summary is not None
    assert expected.batches_per_hour == pytest.approx(summary.batches_per_hour, rel=0.12)
    assert expected.mean_staleness == pytest.approx(summary.staleness.mean, abs=0.6)
