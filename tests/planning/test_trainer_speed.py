"""How long a trainer takes is told without the time in which batches waited for each other, and by their tokens where these tell."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.planning.observed import Trained
from headway.planning.trainer_speed import pace_of


def trained(took, arrivals):
    """Return batches that a trainer takes one after the other, as they arrive."""
    batches, before = [], -np.inf
    for k, (seconds, formed) in enumerate(zip(took, arrivals, strict=True)):
        done = max(formed, before) + seconds
        batches.append(Trained(k, float(formed), float(done), float(before)))
        before = done
    return batches


@given(seed=st.integers(0, 1000), apart=st.sampled_from([0.5, 2.0, 10.0]))
def test_batches_that_wait_for_each_other_take_no_longer(seed, apart):
    rng = np.random.default_rng(seed)
    took = 2.0 * rng.lognormal(0, 0.1, 60)
    batches = trained(took, np.cumsum(rng.exponential(apart, 60)))
    pace = pace_of(batches, {})
    assert pace.seconds == pytest.approx(took.mean())
    assert pace.jitter == pytest.approx(np.log(took).std(), rel=1e-6)
    assert (pace.tokens_per_second, pace.stalls) == (0.0, 0)
    assert all(one.acknowledged <= other.acknowledged for one, other in pairwise(batches))


def test_the_tokens_of_batches_tell_where_they_matter():
    rng = np.random.default_rng(0)
    tokens = rng.uniform(5_000, 15_000, 80)
    sizes = dict(enumerate(tokens))
    by_tokens = pace_of(trained((1.0 + tokens / 2_000) * rng.lognormal(0, 0.02, 80), np.arange(80) * 10.0), sizes)
    assert by_tokens.tokens_per_second == pytest.approx(2_000, rel=0.05)
    assert by_tokens.seconds == pytest.approx(1.0, abs=0.3)
    assert by_tokens.jitter == pytest.approx(0.02, abs=0.01)
    whatever = pace_of(trained(rng.lognormal(0, 0.2, 80), np.arange(80) * 10.0), sizes)
    assert whatever.tokens_per_second == 0


def test_a_stall_is_no_pace():
    took = np.full(40, 2.0)
    took[17] = 300.0
    pace = pace_of(trained(took, np.arange(40) * 1.0), {})
    assert (pace.seconds, pace.jitter, pace.stalls) == (pytest.approx(2.0), 0.0, 1)
