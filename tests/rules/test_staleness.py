"""The bound on tokens is a predicate of two numbers, exact on both sides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.rules.staleness import can_contribute, oldest_contributing
from headway.types import Rollout


def rollout(head, tail, source="live"):
    values = dict.fromkeys(Rollout.__struct_fields__, 0) | {"head": head, "tail": tail, "source": source}
    return Rollout(**values)


@given(st.integers(0, 1000), st.integers(0, 50))
def test_a_token_contributes_iff_its_staleness_is_at_most_the_bound(k, bound):
    oldest = oldest_contributing(k, bound)
    assert k - oldest == bound
    assert can_contribute(rollout(0, oldest), k, bound, "mask")
    assert not can_contribute(rollout(0, oldest - 1), k, bound, "mask")


def test_the_newest_token_decides_whether_anything_of_a_rollout_is_left():
    assert can_contribute(rollout(head=0, tail=9), 10, 1, "mask")
    assert not can_contribute(rollout(head=8, tail=8), 10, 1, "mask")


@pytest.mark.parametrize("on_stale", ["wait", "drop", "train"])
def test_only_a_mask_masks(on_stale):
    """wait and drop keep whole groups within the bound before this is asked, and the double lock looks at what they keep."""
    assert can_contribute(rollout(0, 0), 10**6, 0, on_stale)


@pytest.mark.parametrize("source", ["replay", "external"])
def test_what_was_written_elsewhere_has_no_staleness(source):
    assert can_contribute(rollout(0, 0, source), 10**6, 0, "mask")
