"""Distributions draw what they say: their means, tails and excesses are those of what is drawn, and TOML can write them."""

import math
import tomllib
from statistics import fmean

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sim.chance import Draws
from headway.sim.distributions import Empirical, Fixed, Given, Lognormal, Mixture, Pareto, Uniform, mixture

DISTRIBUTIONS = [
    Fixed(2.0),
    Uniform(1.0, 5.0),
    Uniform(3.0, 3.0),
    Lognormal(3.0, 1.0),
    Lognormal(3.0, 0.0),
    Pareto(2.0, 3.0),
    mixture((0.99, Fixed(1.0)), (0.01, Fixed(20.0))),
    mixture((3.0, Uniform(0.0, 1.0)), (1.0, mixture((1.0, Lognormal(2.0, 0.5)), (1.0, Fixed(9.0))))),
    Empirical((1.0, 2.0, 6.0)),
]
each = pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: type(d).__name__)
POINTS = (0.0, 0.5, 1.0, 1.7, 3.0, 5.5, 20.0)


@each
def test_a_distribution_has_the_mean_that_it_says(distribution):
    draws = Draws("mean")
    assert fmean(distribution.sample(draws) for _ in range(20_000)) == pytest.approx(distribution.mean, rel=0.05)


@each
def test_both_ways_of_drawing_draw_the_same(distribution):
    draws = Draws("alike")
    by_key = np.array([distribution.sample(draws) for _ in range(20_000)])
    at_once = distribution.draw(np.random.default_rng(0), 200_000)
    assert at_once.dtype == np.float64
    for drawn in (by_key, at_once):
        assert drawn.max() <= distribution.largest
        for x in POINTS:
            assert (drawn > x).mean() == pytest.approx(distribution.above(x), abs=0.015)
            assert np.maximum(drawn - x, 0).mean() == pytest.approx(distribution.excess(x), abs=0.06)


@each
@given(x=st.floats(0, 50), step=st.floats(0.001, 5))
def test_the_tail_falls_and_the_excess_is_its_integral(distribution, x, step):
    assert 1 >= distribution.above(x) >= distribution.above(x + step) >= 0
    fall = distribution.excess(x) - distribution.excess(x + step)
    assert step * distribution.above(x + step) - 1e-9 <= fall <= step * distribution.above(x) + 1e-9


@each
def test_nothing_is_below_zero(distribution):
    assert distribution.above(-1.0) == 1.0
    assert distribution.excess(0.0) == pytest.approx(distribution.mean)
    assert distribution.excess(-1.0) == pytest.approx(distribution.mean + 1)


@each
@given(factor=st.floats(0.01, 100), x=st.floats(0, 50))
def test_a_scaled_one_is_the_same_in_another_unit(distribution, factor, x):
    scaled = distribution.scaled(factor)
    assert scaled.mean == pytest.approx(distribution.mean * factor)
    assert scaled.excess(x * factor) == pytest.approx(distribution.excess(x) * factor, abs=1e-6 * factor)


@each
def test_toml_writes_what_it_reads(distribution):
    assert msgspec.convert(msgspec.to_builtins(distribution), Given) == distribution


def test_the_examples_of_the_docstring():
    text = """
        a = {kind = "mixture", parts = [[0.99, {kind = "fixed", value = 25}], [0.01, {kind = "fixed", value = 525}]]}
        b = {kind = "pareto", mean = 30, shape = 2}
    """
    read = msgspec.convert(tomllib.loads(text), dict[str, Given])
    assert read == {"a": Mixture(((0.99, Fixed(25)), (0.01, Fixed(525)))), "b": Pareto(30, 2)}
    assert read["a"].mean == pytest.approx(30)


@given(st.floats(0.1, 100), st.floats(0.1, 2))
def test_half_of_a_lognormal_lies_below_its_median(mean, sigma):
    assert Lognormal(mean, sigma).above(mean * math.exp(-(sigma**2) / 2)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "pareto", "mean": 1.0, "shape": 1.0},
        {"kind": "pareto", "mean": 1.0, "shape": math.nan},
        {"kind": "uniform", "low": 2, "high": 1},
        {"kind": "uniform", "low": -1, "high": 1},
        {"kind": "lognormal", "mean": 0, "sigma": 1},
        {"kind": "empirical", "values": []},
        {"kind": "empirical", "values": [1, -1]},
        {"kind": "mixture", "parts": []},
        {"kind": "mixture", "parts": [[0, {"kind": "fixed", "value": 1}]]},
        {"kind": "weibull", "mean": 1},
        {"kind": "fixed", "value": 1, "mean": 1},
    ],
)
def test_what_is_no_distribution_is_refused(given):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(given, Given)


def test_a_mixture_without_weights_is_refused():
    with pytest.raises(ValueError, match="weight"):
        mixture()
    with pytest.raises(ValueError, match="weight"):
        mixture((math.nan, Fixed(1.0)))
