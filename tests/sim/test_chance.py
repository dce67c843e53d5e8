"""Draws depend on their key alone."""

import math

from hypothesis import given
from hypothesis import strategies as st

from headway.sim.chance import Draws

KEYS = st.lists(st.one_of(st.text(max_size=5), st.integers(0, 9)), min_size=1, max_size=4)


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
