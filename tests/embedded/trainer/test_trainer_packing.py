"""Packing: bins within their limit, arrays that say where everything came from, groups dealt whole."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.embedded.trainer.packing import deal, first_fit_decreasing, pack

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60).map(np.array)


def laid_out(lengths, seed=0):
    """Offsets and a random mask without first tokens."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.random.default_rng(seed).random(offsets[-1]) < 0.6
    mask[offsets[:-1]] = False
    return offsets, mask


@given(lengths=LENGTHS, limit=st.integers(1, 100))
def test_every_sample_lies_in_one_bin_and_bins_keep_their_limit(lengths, limit):
    bins = first_fit_decreasing(lengths, limit)
    np.testing.assert_array_equal(np.sort(np.concatenate(bins)), np.arange(len(lengths)))
    for members in bins:
        assert lengths[members].sum() <= limit or len(members) == 1
        assert (np.diff(lengths[members]) <= 0).all()


@given(lengths=LENGTHS, limit=st.integers(1, 100))
def test_first_fit_leaves_at_most_one_bin_half_empty(lengths, limit):
    half_empty = [members for members in first_fit_decreasing(lengths, limit) if lengths[members].sum() * 2 <= limit]
    assert len(half_empty) <= 1


@given(lengths=LENGTHS, limit=st.integers(1, 100), seed=st.integers(0, 9))
def test_packs_hold_every_token_once_and_know_what_predicts_what(lengths, limit, seed):
    offsets, mask = laid_out(lengths, seed)
    packs = pack(offsets, mask, np.arange(len(lengths)), limit)
    np.testing.assert_array_equal(np.sort(np.concatenate([one.source for one in packs])), np.arange(offsets[-1]))
    np.testing.assert_array_equal(np.sort(np.concatenate([one.contributing for one in packs])), np.flatnonzero(mask))
    sample_of = np.repeat(np.arange(len(lengths)), lengths)
    for one in packs:
        np.testing.assert_array_equal(one.positions, one.source - offsets[sample_of[one.source]])
        np.testing.assert_array_equal(one.source[one.predictors], one.contributing - 1)
        np.testing.assert_array_equal(one.samples, sample_of[one.contributing])
        assert sum(count * length for count, length in one.runs) == len(one.source)
        starts = np.flatnonzero(one.positions == 0)
        assert [length for count, length in one.runs for _ in range(count)] == np.diff([*starts, len(one.source)]).tolist()


@given(lengths=st.lists(st.integers(1, 4), min_size=50, max_size=200).map(np.array))
def test_equal_lengths_lie_side_by_side_so_runs_are_few(lengths):
    offsets, mask = laid_out(lengths)
    (one,) = pack(offsets, mask, np.arange(len(lengths)), int(lengths.sum()))
    assert len(one.runs) <= 4


@given(groups=st.lists(st.integers(0, 12), min_size=1, max_size=80).map(np.array), hands=st.integers(1, 6))
def test_groups_are_dealt_whole_and_evenly(groups, hands):
    dealt = deal(groups, hands)
    np.testing.assert_array_equal(np.sort(np.concatenate(dealt)), np.arange(len(groups)))
    held = [set(groups[hand]) for hand in dealt]
    assert sum(map(len, held)) == len(set(groups))
    assert all(held)
    assert max(map(len, held)) - min(map(len, held)) <= 1


def test_neighbouring_groups_go_to_different_hands():
    first, second = deal(np.array([5, 5, 3, 3, 9, 9]), 2)
    assert first.tolist() == [0, 1, 4, 5]
    assert second.tolist() == [2, 3]
