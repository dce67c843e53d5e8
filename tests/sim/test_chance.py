"""Draws depend on their key alone, and distributions have the mean they say."""

import math
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sim.chance import Draws, Empirical, Fixed, Lognormal, Mixture, Pareto, Uniform

KEYS = st.lists(st.one_of(st.text(max_size=5), st.integers(0, 9)), min_size=1, max_size=4)
DISTRIBUTIONS = [
    Fixed(2.0),
    Uniform(1.0, 5.0),
    Lognormal(3.0, 1.0),
    Pareto(2.0, 3.0),
    Mixture((0.99, Fixed(1.0)), (0.01, Fixed(20.0))),
    Empirical((1.0, 2.0, 6.0)),
]


def take(n, *key):
    draws = Draws(*key)
    return [draws.random() for _ in range(n)]


@given(KEYS)
def test_the_same_key_draws_the_same_numbers_and_another_draws_others(key):
    assert take(20, *key) == take(20, *key)
    assert take(20, *key) != take(20, *key, "x")
    assert len(set(take(20, *key))) == 20
    assert all(0 < number < 1 for number in take(20, *key))


def test_draws_are_pinned_across_processes_and_python_versions():
    assert take(2, 0, "prompt", 1) == [0.959587072665763, 0.059467925820395284]


def test_draws_are_uniform():
    drawn = sorted(take(4000, 1))
    assert max(abs(number - (rank + 0.5) / 4000) for rank, number in enumerate(drawn)) < 1.63 / math.sqrt(4000)  # Kolmogorov-Smirnov, 1 %


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: type(d).__name__)
def test_a_distribution_has_the_mean_that_it_says(distribution):
    draws = Draws("mean")
    assert fmean(distribution.sample(draws) for _ in range(20_000)) == pytest.approx(distribution.mean, rel=0.05)


@given(st.floats(0.1, 100), st.floats(0.1, 2))
def test_half_of_a_lognormal_lies_below_its_median(mean, sigma):
    draws = Draws(mean.hex(), sigma.hex())
    median = mean * math.exp(-(sigma**2) / 2)
    below = sum(Lognormal(mean, sigma).sample(draws) < median for _ in range(400))
    assert 120 < below < 280


def test_a_pareto_without_a_mean_is_refused():
    with pytest.raises(ValueError, match="shape is"):
        Pareto(1.0, 1.0)


def test_a_mixture_without_weights_is_refused():
    with pytest.raises(ValueError, match="weight"):
        Mixture()
