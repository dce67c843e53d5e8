"""Intervals laid over others: at every instant it is the uppermost that is seen."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headway.sim.timeline import overlaid


@st.composite
def stretches(draw, names, *, gaps):
    instants = sorted(draw(st.sets(st.integers(0, 40), max_size=12)) | (set() if gaps else {0, 40}))
    pairs = list(itertools.pairwise(instants))[:: 2 if gaps else 1]
    return [(float(start), float(end), draw(st.sampled_from(names)), "") for start, end in pairs]


def seen(stretches, at):
    return next((what for start, end, what, _ in stretches if start <= at < end), None)


@given(stretches("ab", gaps=False), stretches("xy", gaps=True), st.integers(1, 40))
def test_at_every_instant_the_uppermost_is_seen(under, over, end):
    found = list(overlaid(under, over, float(end)))
    assert found[0][0] == 0.0
    assert found[-1][1] == end
    assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
    assert all(start < until for start, until, _, _ in found)
    for at in range(end):
        assert seen(found, at + 0.5) == (seen(over, at + 0.5) or seen(under, at + 0.5))
