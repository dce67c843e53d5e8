"""Who confirms a plan: the cohort stepper where it can, the virtual loop elsewhere, nobody where that would take too long."""

import msgspec
import pytest

from headway.planning.confirm import MOST_ROLLOUTS, disagreements, settled, simulated
from headway.planning.expected import expect
from headway.settings import RolloutSection
from headway.sim.distributions import Lognormal
from headway.sim.scenario import EvaluationSection, FleetSection, LengthSection, Scenario, TrainingSection, WorkloadSection


def scenario(*, half_speed_at=0.0, steps=60, warm_up=None, **rollout):
    knobs = {"groups_per_batch": 8, "group_size": 2, "max_concurrent": 64, "max_staleness": 4, "timeout_seconds": 0.0} | rollout
    return Scenario(
        workload=WorkloadSection(seconds=Lognormal(4.0, 0.5)),
        training=TrainingSection(seconds=6.0),
        fleet=FleetSection(half_speed_at=half_speed_at),
        rollout=RolloutSection(**knobs),
        run=LengthSection(steps=steps, warm_up=warm_up),
    )


def test_engines_without_load_are_stepped_and_those_that_slow_down_are_played():
    assert simulated(scenario()).by == "cohorts"
    assert simulated(scenario(half_speed_at=32.0)).by == "virtual loop"


def test_a_timeout_that_nothing_reaches_is_no_reason_to_play():
    assert simulated(scenario(timeout_seconds=3600.0)).by == "cohorts"
    assert simulated(scenario(timeout_seconds=8.0, steps=40)).by == "virtual loop"


def test_closed_forms_agree_with_the_components_on_engines_that_slow_down():
    world = scenario(half_speed_at=16.0, steps=120)
    expected, summary = expect(world), simulated(world)
    assert summary is not None
    assert disagreements(expected, summary) == ()
    assert expected.rollout_seconds == pytest.approx(summary.latency_mean, rel=0.1)
    assert expected.rollout_seconds > 1.3 * 4.0


def test_what_would_take_too_long_is_not_played():
    large = scenario(half_speed_at=32.0, groups_per_batch=MOST_ROLLOUTS // 8, group_size=8, max_concurrent=MOST_ROLLOUTS)
    assert simulated(large) is None


def test_a_long_run_is_played_in_part_and_whoever_watches_is_told_of_how_much():
    told, progress = [], []

    def watch(batches):
        told.append(batches)
        return progress.append

    world = scenario(half_speed_at=32.0, groups_per_batch=64, group_size=8, max_concurrent=1024, steps=10_000)
    summary = simulated(world, watch=watch)
    assert told == [20_000 // 512]
    assert progress[-1] == told[0]
    assert 20 <= summary.batches < told[0]


@pytest.mark.parametrize(("steps", "given", "warm_up"), [(200, None, 20), (60, None, 8), (60, 30, 30), (4, None, 3)])
def test_the_warm_up_is_as_long_as_the_pipeline_takes_to_fill(steps, given, warm_up):
    assert settled(scenario(warm_up=given), steps).run.warm_up == warm_up


def test_each_figure_that_is_far_off_is_told():
    world = scenario()
    summary = simulated(world)
    assert summary is not None
    far = msgspec.structs.replace(expect(world), batches_per_hour=1.0, mean_staleness=9.0, masked_share=0.5, head_coverage=0.1)
    assert [line.partition(":")[0] for line in disagreements(far, summary)] == [
        "batches/hour",
        "mean staleness",
        "masked tokens",
        "head coverage",
    ]


@pytest.mark.parametrize(
    "more",
    [
        {"rollout": RolloutSection(groups_per_batch=1_000_000, group_size=1, max_concurrent=2_000_000, timeout_seconds=0.0)},
        {"fleet": FleetSection(half_speed_at=8.0, sync_seconds=1e6)},
        {"eval": EvaluationSection(every=1, prompts=1_000_000)},
    ],
    ids=["large batches", "months", "large evaluations"],
)
def test_what_would_take_a_day_is_not_simulated(more):
    world = Scenario(workload=WorkloadSection(tokens=100), training=TrainingSection(seconds=10.0))
    assert simulated(msgspec.structs.replace(world, **more)) is None
