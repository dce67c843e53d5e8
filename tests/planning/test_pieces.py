"""What was measured is small in a scenario and means the same; sums are taken apart into pieces that add up to them again."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.planning.own_time import own_time
from headway.planning.pieces import MOST_VALUES, empirical, pieces
from headway.sim.distributions import Fixed


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=3000))
def test_the_mean_stays_and_nothing_is_outside_of_what_was_measured(values):
    found = empirical(values)
    assert found.mean == pytest.approx(np.mean(values), rel=1e-4, abs=1e-6)
    assert found.largest <= max(values) * (1 + 1e-5) + 1e-9
    assert isinstance(found, Fixed) or len(found.values) <= MOST_VALUES


def test_a_tail_stays():
    values = 1 + np.random.default_rng(0).pareto(2.0, 50_000)
    found = empirical(values)
    for share in (0.5, 0.1, 0.01):
        assert found.above(float(np.quantile(values, 1 - share))) == pytest.approx(share, abs=0.003)


@pytest.mark.parametrize("kind", ["lognormal", "pareto", "exponential"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_pieces_add_up_to_the_sums(kind, count):
    rng = np.random.default_rng(1)
    draw: dict[str, Callable[[tuple[int, int]], Any]] = {
        "lognormal": lambda size: rng.lognormal(0, 1, size),
        "pareto": lambda size: 1 + rng.pareto(2.5, size),
        "exponential": rng.standard_exponential,
    }
    sums = draw[kind]((20_000, count)).sum(axis=1)
    again = rng.choice(pieces(sums, count), (20_000, count)).sum(axis=1)
    assert again.mean() == pytest.approx(sums.mean(), rel=0.03)
    assert np.quantile(again, [0.1, 0.5, 0.9, 0.99]) == pytest.approx(np.quantile(sums, [0.1, 0.5, 0.9, 0.99]), rel=0.15)


def test_what_each_waits_for_by_itself_is_kept_and_what_a_group_meets_together_is_not():
    rng = np.random.default_rng(2)
    groups = np.repeat(np.arange(500), 8)
    alone = rng.lognormal(0, 0.5, 4000)
    together = np.repeat(rng.lognormal(0, 0.5, 500), 8) + rng.uniform(0, 0.01, 4000)
    assert own_time(alone, groups).std() == pytest.approx(alone.std(), rel=0.08)
    assert own_time(together, groups).std() < 0.02
    assert own_time(together, groups).mean() == pytest.approx(together.mean())
    assert own_time(together, groups).min() > together.mean() - 0.02
    assert (own_time(together, np.arange(4000)) == together).all()
    assert not len(own_time(np.zeros(0), np.zeros(0, np.int64)))
