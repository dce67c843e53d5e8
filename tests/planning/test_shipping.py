"""enforce = "ship" by closed form, against the virtual loop: a queue that keeps groups young, and one that spoils them."""

import msgspec
import pytest

from headway.planning.advice import notes
from headway.planning.balance import balance
from headway.planning.expected import expect
from headway.planning.quiet import quietly
from headway.planning.sensitivity import turned
from headway.settings import RolloutSection
from headway.sim.distributions import Lognormal
from headway.sim.figures import summarise
from headway.sim.play import play
from headway.sim.scenario import FleetSection, LengthSection, Scenario, TrainingSection, WorkloadSection

MILD, HEAVY = Lognormal(10, 0.5), Lognormal(10, 1)


def scenario(seconds=MILD, **rollout):
    """A trainer that takes 10 s for a batch of 32, and engines that hold 64 rollouts of 10 s: twice as many as it takes."""
    knobs = {"groups_per_batch": 32, "group_size": 1, "max_concurrent": 64, "max_staleness": 4, "timeout_seconds": 0.0, "enforce": "ship"}
    return Scenario(
        workload=WorkloadSection(seconds=seconds),
        training=TrainingSection(seconds=10.0, jitter=0.1),
        fleet=FleetSection(sync_seconds=0.5),
        rollout=RolloutSection(**{**knobs, **rollout}),
        run=LengthSection(steps=120, warm_up=20),
    )


def both(world):
    with quietly():
        summary = summarise(play(world))
    expected = expect(world)
    assert expected.batches_per_hour == pytest.approx(summary.batches_per_hour, rel=0.03)
    return expected, summary, 1 - summary.tokens.trained / summary.tokens.sampled


@pytest.mark.parametrize("seconds", [MILD, HEAVY], ids=["mild", "heavy"])
@pytest.mark.parametrize(
    "knobs", [{"max_ready_groups": 32}, {"on_stale": "train"}, {"max_concurrent": 24}], ids=["short", "train", "no queue"]
)
def test_a_queue_in_which_nothing_spoils(seconds, knobs):
    expected, summary, waste = both(scenario(seconds, **knobs))
    assert expected.mean_staleness == pytest.approx(summary.staleness.mean, abs=0.5)
    assert expected.masked_share == pytest.approx(summary.masked_share, abs=0.03)
    assert expected.head_coverage == pytest.approx(summary.head_coverage, abs=0.04)
    assert expected.waste == pytest.approx(waste, abs=0.03)
    assert expected.in_flight == pytest.approx(summary.in_flight_mean, rel=0.1)


@pytest.mark.parametrize("seconds", [MILD, HEAVY], ids=["mild", "heavy"])
def test_what_spoils_with_drop_is_what_is_more_than_the_trainer_takes(seconds):
    expected, summary, waste = both(scenario(seconds, on_stale="drop"))
    assert expected.waste == pytest.approx(waste, abs=0.05)
    assert waste > 0.4
    assert expected.mean_staleness == pytest.approx(summary.staleness.mean, abs=0.25)
    assert expected.in_flight == pytest.approx(summary.in_flight_mean, rel=0.1)


@pytest.mark.parametrize("seconds", [MILD, HEAVY], ids=["mild", "heavy"])
@pytest.mark.parametrize(
    "knobs",
    [{}, {"max_concurrent": 200}, {"group_size": 4, "groups_per_batch": 8, "max_staleness": 8}],
    ids=["twice", "six times", "groups"],
)
def test_what_spoils_with_mask_is_told_roughly(seconds, knobs):
    expected, summary, waste = both(scenario(seconds, **knobs))
    assert expected.waste == pytest.approx(waste, abs=0.25)
    assert min(waste, expected.waste) > 0.4
    assert expected.masked_share == pytest.approx(summary.masked_share, abs=0.27)
    assert expected.mean_staleness == pytest.approx(summary.staleness.mean, abs=0.6)
    assert summary.head_coverage < 0.6


@pytest.mark.parametrize("seconds", [MILD, HEAVY], ids=["mild", "heavy"])
def test_a_queue_as_long_as_the_plan_says_does_not_spoil(seconds):
    world = scenario(seconds)
    [note] = [note for note in notes(world, expect(world)) if note.startswith("enforce")]
    assert "engines end 1.8 x as many groups as are trained" in note
    enough = int(note.rpartition("max_ready_groups = ")[2].split()[0])
    assert 0 < enough < 5 * 32
    kept, longer = turned(world, max_ready_groups=enough), turned(world, max_ready_groups=round(1.25 * enough))
    assert not balance(kept).queue.spoils
    assert balance(longer).queue.spoils
    assert not [note for note in notes(kept, expect(kept)) if note.startswith("enforce")]
    _, summary, waste = both(kept)
    assert waste < 0.25
    assert summary.head_coverage > 0.8


def test_a_bound_that_is_below_what_training_takes_has_no_queue_short_enough():
    world = scenario(max_staleness=1)
    [note] = [note for note in notes(world, expect(world)) if note.startswith("enforce")]
    assert note.endswith('max_concurrent lower, max_staleness higher, or enforce = "admission"')


def test_admission_has_no_queue():
    assert balance(msgspec.structs.replace(scenario(), rollout=turned(scenario(), enforce="admission").rollout)).queue is None
