"""Whose weights wrote what, counted a few ten thousand rollouts at a time: tokens, rollouts and lengths by staleness.

Token i of a rollout that starts at s is written at s + i / speed on the generation clock, by the version that was served then (as
`sim.engine` stamps it). So the versions of a batch are told from starts and lengths alone, after the fact. Rollouts of one batch that start
at one instant (a *cell*) differ in nothing but their lengths n: under the j-th version that they meet, min(n, c_j) - min(n, c_(j-1)) tokens
of each are written, c_j being one number for the whole cell.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from headway.sim.cohort_units import ROUNDING, Flags, Ints
from headway.sim.distributions import Floats

_EXACT = 1 << 16  # lengths below are told apart; longer ones lie in bins
_BINS = 100  # of a decade
_DECADES = 6
_FEW = 256  # so many rollouts are counted under all that they have yet to meet at once
_PLACES = 1 << 18  # rollouts x versions of a table


class Served(NamedTuple):
    """What was served since when: `since` on the generation clock, the version, and the seconds of syncs up to then; a value each."""

    since: list[float]
    versions: list[int]
    pauses: list[float]


class Cells(NamedTuple):
    """Rollouts by batch and start: `k`, `start` and the number of rollouts of each cell, and the tokens of all, cell by cell."""

    k: Ints
    starts: Floats
    sizes: Ints
    tokens: Floats


class _Rest(NamedTuple):
    """Rollouts that are counted in part: `written` tokens, by version number `at`; `headless`: none of those is trained on."""

    k: Ints
    starts: Floats
    tokens: Floats
    at: Ints
    written: Floats
    headless: Flags

    def columns(self, rows: slice) -> _Rest:
        """Return some of them as columns: [rollouts, 1]."""
        at = rows, np.newaxis
        return _Rest(self.k[at], self.starts[at], self.tokens[at], self.at[at], self.written[at], self.headless[at])


class TokenCounts:
    """Counts by staleness and by length. `bound`: staler tokens are not trained on; None: all are.

    `tokens[s]`: tokens of staleness s, masked ones too. `heads[s]`: rollouts of which the oldest trained token is of staleness s.
    `covered`: rollouts that are trained on from their first token. `seconds`: of all together, with the syncs before their last tokens.
    `few`: so many are counted in a table of rollouts and versions, which costs less than a vector step for each version that they meet.
    """

    def __init__(self, speed: float, bound: int | None, *, few: int = _FEW) -> None:
        self._speed = speed
        self._few = few
        self._oldest = math.inf if bound is None else bound
        self.tokens: Ints = np.zeros(1, np.int64)
        self.heads: Ints = np.zeros(1, np.int64)
        self.rollouts = self.covered = 0
        self.seconds = 0.0
        self._by_length = np.zeros((4, _EXACT + _BINS * _DECADES))  # rollouts, tokens of long ones, masked tokens, rollouts not covered

    @property
    def by_length(self) -> Floats:
        """Return rollouts, tokens, trained tokens and covered rollouts by length, ascending: [4, lengths]."""
        rollouts, long, masked, uncovered = self._by_length
        tokens = np.append(rollouts[:_EXACT] * np.arange(_EXACT), long[_EXACT:])
        return np.stack([rollouts, tokens, tokens - masked, rollouts - uncovered])

    def add(self, cells: Cells, served: Served) -> None:
        """Count the rollouts of some batches."""
        oldest = max(0, bisect_right(served.since, float(cells.starts.min()) + ROUNDING) - 1)
        since, versions, pauses = (np.array(each[oldest:]) for each in served)
        born = since.searchsorted(cells.starts + ROUNDING, side="right") - 1
        late = cells.k - versions[born] > self._oldest
        self.rollouts += len(cells.tokens)
        self.covered += len(cells.tokens) - int(cells.sizes[late].sum())
        self._count_lengths(cells, late, since, versions)
        self._count_versions(cells, born, since, versions, np.diff(pauses))

    def _count_versions(self, cells: Cells, born: Ints, since: Floats, versions: Ints, pauses: Floats) -> None:
        """Count tokens and heads by staleness: one version that they meet after the other, and all others at once for the last few."""
        k, starts, sizes, left = cells.k, cells.starts, cells.sizes, cells.tokens
        self.seconds += float(left.sum()) / self._speed
        ends = np.append(since[1:], np.inf)
        written, headless, at = np.zeros(len(k)), np.ones(len(k), np.bool_), born
        values = int((k - versions[born]).max()) + 1  # staleness only falls
        tokens, heads = np.zeros(values), np.zeros(values)
        while len(left) > self._few:
            until = np.ceil((ends[at] - starts) * self._speed - ROUNDING)
            reach = until.repeat(sizes)
            offsets = sizes.cumsum() - sizes
            count = np.add.reduceat(np.minimum(left, reach), offsets) - written * sizes
            staleness = k - versions[at]
            tokens += np.bincount(staleness, count, values)
            if headless.any():
                first = headless & (until > written) & (staleness <= self._oldest)
                heads += np.bincount(staleness[first], sizes[first], values)
                headless = headless & ~first
            longer = left > reach
            sizes = np.add.reduceat(longer, offsets, dtype=np.int64)
            going = sizes.nonzero()[0]
            left = left[longer]
            k, starts, sizes, at = k.take(going), starts.take(going), sizes.take(going), at.take(going)
            written, headless = until.take(going), headless.take(going)
            self.seconds += float(pauses[at] @ sizes)
            at += 1
        if len(left):
            each = np.arange(len(k)).repeat(sizes)
            rest = _Rest(k[each], starts[each], left, at[each], written[each], headless[each])
            self._count_rest(rest, ends, versions, np.append(pauses, 0.0), tokens, heads)
        self.tokens, self.heads = _added(self.tokens, tokens), _added(self.heads, heads)

    def _count_rest(self, rest: _Rest, ends: Floats, versions: Ints, pauses: Floats, tokens: Floats, heads: Floats) -> None:
        """Add what is left of some rollouts to `tokens` and `heads`, in tables of [rollouts, versions]."""
        first = int(rest.at.min())
        last = int(ends.searchsorted((rest.starts + rest.tokens / self._speed).max())) + 2  # one more than needed, for rounding
        ends, versions, pauses = ends[first:last], versions[first:last], pauses[first:last]
        rows = max(1, _PLACES // len(ends))
        for row in range(0, len(rest.k), rows):
            k, starts, left, at, written, headless = rest.columns(slice(row, row + rows))
            met = np.arange(first, first + len(ends)) >= at
            until = np.where(met, np.ceil((ends - starts) * self._speed - ROUNDING), written)
            count = np.diff(np.minimum(left, until), prepend=written)
            some = count > 0
            staleness = k - versions
            tokens += np.bincount(staleness[some], count[some], len(tokens))
            trained = some & headless & (staleness <= self._oldest)
            which = np.flatnonzero(trained.any(axis=1))
            heads += np.bincount(staleness[which, trained[which].argmax(axis=1)], minlength=len(heads))
            self.seconds += float(((left > until) & met).sum(axis=0) @ pauses)

    def _count_lengths(self, cells: Cells, late: Flags, since: Floats, versions: Ints) -> None:
        """Count rollouts by length; of those that began too early, `late`, what of them is too old."""
        lengths = _place(cells.tokens)
        rollouts = np.bincount(lengths)
        self._by_length[0, : len(rollouts)] += rollouts
        if len(rollouts) > _EXACT:
            _add(self._by_length[1], lengths, cells.tokens)
        if not late.any():
            return
        served = np.append(since, np.inf)[versions.searchsorted(cells.k - self._oldest)]  # since when nothing is that is too old for k
        early = np.ceil((served - cells.starts) * self._speed - ROUNDING)
        of_late = late.repeat(cells.sizes)
        masked = np.minimum(cells.tokens, early.repeat(cells.sizes))[of_late]
        _add(self._by_length[2], lengths[of_late], masked)
        _add(self._by_length[3], lengths[of_late], np.ones(len(masked)))


def cells_of(k: list[int], starts: list[Floats], tokens: list[Floats]) -> Cells:
    """Return the cells of batches of one size. `starts` [units] and `tokens` [units, members] of each."""
    size, members = tokens[0].shape
    all_starts = np.concatenate(starts)
    new = np.empty(len(all_starts), np.bool_)
    np.not_equal(all_starts[1:], all_starts[:-1], out=new[1:])
    new[::size] = True
    first = np.flatnonzero(new)
    units = np.diff(first, append=len(all_starts))
    return Cells(np.array(k)[first // size], all_starts[first], units * members, np.concatenate(tokens).ravel())


def _place(tokens: Floats) -> Ints:
    """Return the place of each length in `by_length`."""
    places = tokens.astype(np.int64)
    if places.max() >= _EXACT:
        bins = ((np.log10(tokens) - np.log10(_EXACT)) * _BINS).astype(np.int64)
        places = np.where(places < _EXACT, places, _EXACT + np.minimum(bins, _BINS * _DECADES - 1))
    return np.asarray(places)


def _add(row: Floats, places: Ints, weights: Floats) -> None:
    counts = np.bincount(places, weights=weights)
    row[: len(counts)] += counts


def _added(counts: Ints, more: Floats) -> Ints:
    if len(more) > len(counts):
        counts = np.append(counts, np.zeros(len(more) - len(counts), np.int64))
    counts[: len(more)] += np.rint(more).astype(np.int64)
    return counts
