"""Packing: many samples laid end to end in one sequence, positions restarting, none seeing another.

Bins are filled first-fit decreasing, so samples of equal length lie side by side in a bin: attention then takes each *run* of equal
lengths as one batch (`attention.py`), however short the samples are. A sample longer than the limit gets a bin of its own. Numpy only; the
arrays of a pack are built without a loop over samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """One packed sequence of t tokens, c of which contribute.

    `source` int64 (t): index of each token in the batch's flat arrays; `positions` int64 (t): position within its sample; `runs`: pairs
    (count, length) in order, together the whole pack: `count` neighbouring samples of `length` tokens each. `predictors` int64 (c): index
    in the pack of the token *before* each contributing one (whose hidden state predicts it); `contributing` int64 (c): index of the
    contributing tokens in the flat arrays; `samples` int64 (c): the sample each belongs to.
    """

    source: Ints
    positions: Ints
    runs: tuple[tuple[int, int], ...]
    predictors: Ints
    contributing: Ints
    samples: Ints


def first_fit_decreasing(lengths: Ints, limit: int) -> list[Ints]:
    """Return bins of indices into `lengths`, longest first, each bin's sum at most `limit` (or one item that is longer than that)."""
    order = np.argsort(-lengths, kind="stable")
    if lengths.sum() <= limit:
        return [order] if len(order) else []
    bins: list[list[int]] = []
    room = np.empty(len(order), dtype=np.int64)
    for index in order:
        length = int(lengths[index])
        fits = room[: len(bins)] >= length
        slot = int(fits.argmax()) if fits.any() else len(bins)
        if slot == len(bins):
            bins.append([])
            room[slot] = limit
        bins[slot].append(int(index))
        room[slot] -= length
    return [np.asarray(members, dtype=np.int64) for members in bins]


def pack(offsets: Ints, mask: npt.NDArray[np.bool_], selected: Ints, limit: int) -> list[Pack]:
    """Pack the selected samples into sequences of at most `limit` tokens.

    `offsets` int64 (samples + 1): where each sample starts in the flat arrays; `mask` bool (tokens): contributing tokens, none of them the
    first of its sample; `selected` int64: the samples to pack.
    """
    lengths = np.diff(offsets)[selected]
    return [_lay(offsets, mask, selected[members]) for members in first_fit_decreasing(lengths, limit)]


def _lay(offsets: Ints, mask: npt.NDArray[np.bool_], samples: Ints) -> Pack:
    """Lay samples end to end in the order given."""
    lengths = offsets[samples + 1] - offsets[samples]
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum(), dtype=np.int64) - np.repeat(starts, lengths)
    source = np.repeat(offsets[samples], lengths) + positions
    (contributing,) = np.nonzero(mask[source])
    return Pack(
        source=source,
        positions=positions,
        runs=_runs(lengths),
        predictors=contributing - 1,
        contributing=source[contributing],
        samples=np.repeat(samples, lengths)[contributing],
    )


def _runs(lengths: Ints) -> tuple[tuple[int, int], ...]:
    """Return (count, length) of each run of equal neighbours; samples without a token have no part in it."""
    lengths = lengths[lengths > 0]
    edges = np.flatnonzero(np.diff(lengths, prepend=-1, append=-1))
    return tuple((int(end - start), int(lengths[start])) for start, end in pairwise(edges))


def deal(units: Ints, hands: int) -> Sequence[Ints]:
    """Deal samples to at most `hands` minibatches by their unit (samples of one group share a number), like cards: whole units, in order.

    Neighbouring units are dealt to different hands, so each minibatch gets a like mix of old and young groups. Empty hands are left out.
    """
    _, first, unit = np.unique(units, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    dealt = rank[unit] % hands
    return [np.flatnonzero(dealt == hand) for hand in range(min(hands, len(first)))]
