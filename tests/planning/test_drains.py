"""weight_sync = "wait" by its recursion, against the components that ship on virtual time, and against what must hold of it."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.planning.advice import notes
from headway.planning.drains import drains
from headway.planning.expected import expect
from headway.planning.judge import judge
from headway.planning.quiet import quietly
from headway.planning.sensitivity import turned
from headway.settings import RolloutSection
from headway.sim.distributions import Fixed, Lognormal, Uniform
from headway.sim.figures import summarise
from headway.sim.play import play
from headway.sim.scenario import Failing, FleetSection, LengthSection, Scenario, TrainingSection, WorkloadSection

UNIFORM, MILD, HEAVY = Uniform(2, 18), Lognormal(10, 0.5), Lognormal(10, 1)
LOADED = {"engines": 4, "half_speed_at": 8.0}


def scenario(seconds=MILD, *, train=10.0, steps=120, fleet=None, workload=None, **rollout):
    """A world whose rollouts take 10 s on average on an engine with nothing else to do, and whose engines run empty at each sync."""
    knobs = {
        "groups_per_batch": 32,
        "group_size": 1,
        "max_concurrent": 2000,
        "max_staleness": 4,
        "steps_ahead": 2.0,
        "timeout_seconds": 0.0,
    }
    return Scenario(
        workload=WorkloadSection(seconds=seconds, **(workload or {})),
        training=TrainingSection(seconds=train, jitter=0.1),
        fleet=FleetSection(**({"sync_seconds": 0.5, "weight_sync": "wait"} | (fleet or {}))),
        rollout=RolloutSection(**knobs | rollout),
        run=LengthSection(steps=steps, warm_up=15),
    )


@pytest.mark.parametrize(
    ("world", "rate", "mean"),
    [
        (scenario(UNIFORM), 0.06, 0.2),
        (scenario(UNIFORM, steps_ahead=1.0), 0.06, 0.2),
        (scenario(MILD, steps_ahead=4.0), 0.1, 0.25),
        (scenario(MILD, steps_ahead=2.5), 0.1, 0.25),
        (scenario(MILD, steps_ahead=0.0), 0.06, 0.01),
        (scenario(MILD, train=60.0), 0.06, 0.2),
        (scenario(HEAVY), 0.15, 0.25),
        (scenario(HEAVY, groups_per_batch=8, group_size=8), 0.15, 0.25),
        (scenario(MILD, fleet=LOADED), 0.1, 0.2),
        (scenario(MILD, fleet={"engines": 2, "max_sequences": 10}), 0.15, 0.25),
        (scenario(MILD, max_concurrent=20), 0.25, 0.35),
        (scenario(MILD, workload={"turns": 3, "tool_seconds": 3.0}), 0.1, 0.25),
        (scenario(MILD, workload={"failures": (Failing(cause="environment_error", share=0.2),)}), 0.15, 0.25),
    ],
    ids=[
        "uniform", "one ahead", "four ahead", "half a step", "in turn", "slow trainer", "heavy", "groups", "load", "few sequences",
        "few in flight", "tools", "failures",
    ],
)  # fmt: skip
def test_it_is_near_what_the_components_do(world, rate, mean):
    expected = expect(world)
    with quietly():
        summary = summarise(play(world))
    assert expected.batches_per_hour == pytest.approx(summary.batches_per_hour, rel=rate)
    assert expected.mean_staleness == pytest.approx(summary.staleness.mean, abs=mean)
    assert expected.max_staleness == summary.staleness.max
    assert (expected.masked_share, expected.head_coverage) == (summary.masked_share, summary.head_coverage) == (0.0, 1.0)


@settings(max_examples=20, deadline=None)
@given(
    ahead=st.floats(1.0, 6.0),
    train=st.floats(0.5, 40.0),
    room=st.sampled_from([16, 40, 2000]),
    groups=st.integers(1, 40),
    seconds=st.sampled_from([UNIFORM, MILD, HEAVY, Fixed(10.0)]),
)
def test_nothing_is_staler_than_steps_ahead_and_nothing_faster_than_the_trainer(ahead, train, room, groups, seconds):
    world = scenario(seconds, train=train, max_staleness=6, steps_ahead=ahead, max_concurrent=room, groups_per_batch=groups)
    expected = expect(world)
    assert expected.cycle_seconds >= train * (1 - 1e-6)
    assert 0 <= expected.mean_staleness <= expected.max_staleness <= np.ceil(ahead)
    assert 0 < expected.trainer_busy <= 1


def test_engines_that_run_empty_are_what_binds_and_what_is_told():
    world = scenario(max_staleness=16)
    assert expect(world).binding == "sync"
    judged = judge(world, None)
    assert judged.binding.startswith('weight_sync = "wait" binds: the trainer waits ')
    assert [verdict.key for verdict in judged.verdicts] == ["steps_ahead", "max_concurrent"]
    assert judged.better_expected.batches_per_hour > 1.2 * judged.expected.batches_per_hour
    [note] = [note for note in judged.notes if "weight_sync" in note]
    assert 'with "in_flight": batches/hour 242 -> 360' in note


def test_more_steps_ahead_than_it_takes_are_too_many():
    found = {verdict.key: verdict for verdict in judge(scenario(UNIFORM, max_staleness=16, steps_ahead=16.0), None).verdicts}
    better = found["steps_ahead"].better
    assert isinstance(better, float)
    assert 2 <= better <= 4


def test_engines_that_run_empty_one_after_the_other_are_left_to_the_simulation():
    world = scenario(fleet={"engines": 4, "sync_order": "rolling"})
    assert not drains(world)
    assert any("go by the simulation" in note for note in notes(world, expect(world)))
    assert drains(scenario(fleet={"sync_order": "rolling"}))
    assert not drains(turned(scenario(), enforce="ship"))
    assert not drains(msgspec.structs.replace(scenario(), fleet=FleetSection()))
