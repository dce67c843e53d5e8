"""The closed forms of a plan, against draws, against each other, and against the figures of the design."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.planning import forms
from headway.planning.curves import curve_of
from headway.sim.distributions import Empirical, Fixed, Lognormal, Mixture, Pareto, Uniform

UNIFORM, MILD, HEAVY, PARETO = Uniform(0.2, 1.8), Lognormal(1.0, 0.5), Lognormal(1.0, 1.0), Pareto(1.0, 2.0)
STRAGGLERS = Mixture(((0.99, Fixed(1 / 1.19)), (0.01, Fixed(20 / 1.19))))  # 1 % that are 20 x as long
WORLDS = [UNIFORM, MILD, HEAVY, PARETO, STRAGGLERS, Empirical((0.5, 0.75, 1.0, 1.75))]
CYCLE = 1.02  # STALENESS.md: E[L] = T = 1, W = .02 T

few = settings(max_examples=25, deadline=None)
worlds = st.sampled_from(WORLDS)
ages = st.floats(0.0, 12.0)
sizes = st.integers(1, 16)


def drawn(world, size, shift=0.0, count=60_000):
    """Return members (count, size), and the slowest of each group (count, 1)."""
    members = world.draw(np.random.default_rng(5), count * size).reshape(count, size) + shift
    return members, members.max(axis=1, keepdims=True)


@pytest.mark.parametrize("world", WORLDS)
def test_a_curve_has_the_distributions_mean_and_excess(world):
    curve = curve_of(world)
    assert curve.mean == pytest.approx(world.mean, rel=1e-9)
    for edge in curve.edges[::97]:
        assert curve.excess(float(edge)) == pytest.approx(world.excess(float(edge)), abs=1e-9)


@few
@given(worlds, st.floats(0.1, 100.0), st.floats(0.0, 50.0))
def test_a_curve_that_is_scaled_and_shifted_is_that_of_the_scaled_and_shifted(world, scale, shift):
    curve = curve_of(world).moved(scale, shift)
    assert curve.mean == pytest.approx(world.mean * scale + shift, rel=1e-9)
    assert np.all(np.diff(curve.edges) > 0)
    assert float(curve.at(shift / 2)) == 1.0 or shift == 0


@pytest.mark.parametrize("world", [UNIFORM, MILD, HEAVY, STRAGGLERS])
@pytest.mark.parametrize("size", [2, 8, 16])
def test_the_mean_of_the_slowest_is_that_of_draws(world, size):
    assert curve_of(world).largest_of(size).mean == pytest.approx(float(drawn(world, size)[1].mean()), rel=0.02)


@few
@given(worlds, sizes, ages, st.floats(0.0, 8.0), st.floats(0.0, 2.0))
def test_the_share_of_older_tokens_is_that_of_draws(world, size, age, residence, shift):
    members, slowest = drawn(world, size, shift, count=8_000)
    here = np.maximum(residence, slowest)
    share = np.minimum(members, np.maximum(here - age, 0.0)).sum() / members.sum()
    assert forms.older(curve_of(world).moved(1.0, shift), size, age, residence) == pytest.approx(share, abs=0.04)


@few
@given(worlds, sizes, st.floats(-2.0, 8.0), st.floats(0.2, 4.0))
def test_groups_that_start_on_the_beat_grow_old_on_the_beat(world, size, age, beat):
    members, slowest = drawn(world, size, count=8_000)
    late = beat * (np.ceil((slowest - age) / beat + 0.5) - 1)  # what was written until then is older
    share = np.minimum(members, np.maximum(late, 0.0)).sum() / members.sum()
    found = forms.older(curve_of(world), size, age, beat=beat)
    near = [
        forms.older(curve_of(world), size, age + nudge * world.mean, beat=beat) for nudge in (-0.02, 0.02)
    ]  # lengths that are whole beats
    assert min(found, *near) - 0.03 <= share <= max(found, *near) + 0.03


@few
@given(worlds, ages)
def test_for_one_member_it_is_the_formula_of_the_design(world, age):
    assert forms.older(curve_of(world), 1, age) == pytest.approx(world.excess(age) / world.mean, abs=0.002)


@few
@given(worlds, sizes, st.floats(0.2, 4.0))
def test_a_larger_bound_masks_no_more_and_covers_no_less(world, size, cycle):
    curve = curve_of(world)
    masked = [forms.masked_share(curve, bound, cycle, group_size=size) for bound in range(12)]
    covered = [forms.head_coverage(curve, bound, cycle, group_size=size) for bound in range(12)]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(masked))
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(covered))
    assert all(0 <= share <= 1 for share in masked + covered)


@few
@given(worlds, st.integers(0, 10))
def test_more_members_in_a_group_age_more(world, bound):
    curve = curve_of(world)
    masked = [forms.masked_share(curve, bound, 1.0, group_size=size) for size in (1, 2, 4, 8)]
    assert all(larger >= smaller - 1e-9 for smaller, larger in itertools.pairwise(masked))


@few
@given(worlds, sizes, st.floats(0.3, 3.0), st.floats(0.0, 8.0))
def test_the_shares_of_staleness_and_what_is_beyond_are_all(world, size, cycle, residence):
    curve, most = curve_of(world), 6
    shares = forms.staleness_shares(curve, cycle, most=most, group_size=size, residence=residence)
    beyond = forms.older(curve, size, forms.youngest_masked(most, cycle), residence)
    assert np.all(shares >= -1e-9)
    assert float(shares.sum()) + beyond == pytest.approx(1.0)


@pytest.mark.parametrize("world", [HEAVY, PARETO, STRAGGLERS])
def test_what_is_dropped_is_what_draws_drop(world):
    members, slowest = drawn(world, 8, count=30_000)
    age = forms.youngest_masked(4, 1.0)
    late = slowest[:, 0] > age
    written, kept = np.minimum(members, age)[late].sum(), members[~late].sum()
    groups, tokens = forms.dropped(curve_of(world), 4, 1.0, group_size=8)
    assert groups == pytest.approx(late.mean(), abs=0.01)
    assert tokens == pytest.approx(written / (written + kept), abs=0.01)


@few
@given(worlds, st.floats(0.0, 20.0))
def test_the_residence_is_found_that_has_a_mean(world, mean):
    curve = curve_of(world)
    residence = curve.solve(mean)
    assert residence + curve.excess(residence) == pytest.approx(max(mean, curve.mean), rel=1e-6)


@pytest.mark.parametrize(
    ("world", "smallest"),
    [(UNIFORM, 3), (MILD, 3), (HEAVY, 8), (PARETO, 13), (STRAGGLERS, 16)],
    ids=["uniform", "lognormal .5", "lognormal 1", "pareto 2", "1 % at 20 x"],
)
def test_the_smallest_bound_for_two_per_cent_waste_is_the_designs(world, smallest):
    curve = curve_of(world)
    assert next(bound for bound in range(100) if forms.masked_share(curve, bound, CYCLE) <= 0.02) == smallest


def test_batch_size_is_as_good_a_lever_as_the_bound():
    curve = curve_of(HEAVY)  # a batch twice as large: half as many versions in a rollout's time
    shares = [forms.masked_share(curve, 4, size / 256 * CYCLE) for size in (256, 512, 1024)]
    assert shares == pytest.approx([0.088, 0.026, 0.0055], rel=0.25, abs=0.0015)  # STALENESS.md, knobs


def test_steps_ahead_and_rollouts_in_flight_are_those_of_the_design():
    assert forms.steps_ahead_needed(1.0, 1.0, 8) == 2.0
    assert forms.steps_ahead_needed(3.08, 1.0, 8) == 4.5
    assert forms.steps_ahead_needed(30.0, 1.0, 8) == 8.0
    assert forms.rollouts_needed(256, 10.0, 10.0, 1) == 320
    assert forms.rollouts_needed(512, 10.0, 10.0, 8) == 640
    assert forms.rollouts_needed(1, 0.001, 10.0, 8) == 8


def test_a_bound_of_the_longest_rollout_wastes_nothing():
    longest, cycle = 1.8, 1.02
    bound = forms.zero_waste_staleness(longest, cycle, cycle)
    assert bound is not None
    assert forms.masked_share(curve_of(UNIFORM), bound, cycle, group_size=16) == 0.0
    assert forms.zero_waste_staleness(longest, cycle) == 2
    assert forms.zero_waste_staleness(math.inf, cycle) is None


@pytest.mark.parametrize("ahead", [1, 2, 4, 8])
def test_waiting_for_groups_that_are_all_alike_is_the_cycle_of_the_gate(ahead):
    waited = forms.wait_cycle(Fixed(10.0), np.random.default_rng(0), groups=4, group_size=2, train_seconds=1.0, max_staleness=ahead)
    assert waited == pytest.approx(max(1.0, forms.gate_cycle(10.0, 1.0, 0.0, ahead, waiting=0.0)), rel=0.01)


def test_waiting_for_a_heavy_tail_costs_what_the_design_says():
    rng = np.random.default_rng(0)
    waited = forms.wait_cycle(HEAVY, rng, groups=256, group_size=1, train_seconds=1.0, max_staleness=4)
    assert 1 / waited == pytest.approx(0.28, abs=0.04)  # STALENESS.md: useful tokens of wait, lognormal 1


def test_in_turn_a_batch_takes_its_longest_rollout_and_its_training():
    assert forms.in_turn_cycle(curve_of(Fixed(3.0)), 64, 2.0, 0.5) == pytest.approx(5.5, rel=0.01)


@pytest.mark.parametrize("world", [Fixed(math.inf), Mixture(((1.0, Fixed(1.0)), (1.0, Fixed(math.inf))))])
def test_a_distribution_without_a_mean_is_refused_in_one_line(world):
    with pytest.raises(ConfigError, match="needs a mean") as error:
        curve_of(world)
    assert "\n" not in str(error.value)
