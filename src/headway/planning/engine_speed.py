"""How fast engines write, told apart from what else a rollout waits for, from when rollouts started and ended and how many were in flight.

The model is the simulator's: of n sequences that decode at an engine each gets `tokens_per_second / (1 + n / half_speed_at)`. An engine's
*work clock* adds up 1 / (1 + n(t) / half_speed_at) dt, and stands still during weight syncs. On that clock a rollout of x tokens lasts
x / tokens_per_second + what its environment took. So for each half_speed_at the lives of all rollouts are measured on the clock, a line is
laid through them by least absolute deviations (a heavy tail of tool times does not move it), and the half_speed_at is kept under which the
lives lie closest to their line. What of a life is above the line is the environment's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.planning.observed import Observed
from headway.planning.own_time import own_time
from headway.sim.distributions import Floats

_MOST_FITTED = 4000  # rollouts
_WORTH_A_FALL = 0.015  # of the misses, at least, must vanish
_NEIGHBOURS = 64  # rollouts of about the same time
_ENVIRONMENT_SHARE = 0.02  # of a rollout's life, at least, or there is none to speak of


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What was found. `environment`: seconds that each rollout spent on other things than decoding; empty: none to speak of.

    `half_speed_at` 0: no fall with load can be seen. `told_apart`: rollouts differ in their tokens, so that decoding and environment could
    be told apart. `in_flight`: rollouts per engine, on average, at which all that was seen.
    """

    tokens_per_second: float
    half_speed_at: float
    environment: Floats
    told_apart: bool
    in_flight: float


def speed_of(observed: Observed, *, engines: int, max_sequences: int, pauses: bool) -> Speed:
    """Return what engines do. `max_sequences` 0: no limit; `pauses`: nothing is decoded while an engine takes new weights."""
    lives = np.array([one[1:] for one in observed.rollouts], np.float64)
    chosen = lives[np.linspace(0, len(lives) - 1, min(len(lives), _MOST_FITTED)).astype(np.int64)]
    sampled = chosen[:, 2]
    told_apart = bool(sampled.std() > 0.02 * sampled.mean())
    clock = _Clock(observed, engines, max_sequences, pauses=pauses)
    half_speed_at = _best(clock, chosen, told_apart=told_apart)
    above, work = _above_the_line(clock, half_speed_at, lives, chosen, told_apart=told_apart)
    for _ in range(2):  # what share of those in flight decodes is known afterwards
        if abs(clock.decoding_share - (share := 1 - float(above.sum() / work.sum()))) < 0.02:
            break
        clock.decoding_share = share
        half_speed_at = _best(clock, chosen, told_apart=told_apart)
        above, work = _above_the_line(clock, half_speed_at, lives, chosen, told_apart=told_apart)
    seconds = lives[:, 1] - lives[:, 0]
    environment = above * seconds / np.maximum(work, 1e-12) if above.any() else np.zeros(0)
    return Speed(
        tokens_per_second=float(lives[:, 2].sum() / max((work - above).sum(), 1e-12)),  # so that lives are as long on average as they were
        half_speed_at=half_speed_at,
        environment=own_time(environment, np.array([one.group for one in observed.rollouts], np.int64)),
        told_apart=told_apart,
        in_flight=observed.mean_in_flight / engines,
    )


def _above_the_line(clock: _Clock, half_speed_at: float, lives: Floats, chosen: Floats, *, told_apart: bool) -> tuple[Floats, Floats]:
    """Return how far each life lies above the line through the chosen ones that ends at 0 tokens, and how long it is, by the work clock.

    What made all rollouts of a time slower is no rollout's own: machines that others use have better and worse minutes. Their mean is in
    the speed; left in, it would be drawn for each rollout by itself, and a group would wait for the worst of eight machines.
    """
    slope, rest = _line(clock.between(half_speed_at, chosen), chosen[:, 2], told_apart=told_apart)
    work = clock.between(half_speed_at, lives)
    in_time = np.argsort(lives[:, 0] + lives[:, 1])
    usual = np.empty(len(lives))
    for alike in np.array_split(in_time, max(1, len(lives) // _NEIGHBOURS)):
        usual[alike] = np.median(work[alike] / (slope * lives[alike, 2] + rest))
    above = np.maximum(work / np.maximum(usual, 0.05) - slope * lives[:, 2], 0.0)
    if above.sum() < _ENVIRONMENT_SHARE * work.sum():
        above[:] = 0.0
    return above, work


class _Clock:
    """The work clock of an engine, for any half_speed_at; all engines are taken to be equally loaded."""

    def __init__(self, observed: Observed, engines: int, max_sequences: int, *, pauses: bool) -> None:
        spans = [(sync.time - sync.seconds, sync.time) for sync in observed.syncs if pauses and sync.seconds > 0]
        edges = np.array([edge for span in spans for edge in span], np.float64)
        self._times = np.unique(np.concatenate([observed.times[np.isfinite(observed.times)], edges]))
        at = np.searchsorted(observed.times, self._times, side="right") - 1
        self._in_flight = observed.in_flight[at] / engines
        middle = (self._times[:-1] + self._times[1:]) / 2
        held = np.zeros(len(middle), np.bool_)
        for begin, end in spans:
            held[np.searchsorted(middle, begin) : np.searchsorted(middle, end)] = True
        self._seconds = np.where(held, 0.0, np.diff(self._times))
        self._max_sequences = float(max_sequences) if max_sequences else np.inf
        self.decoding_share = 1.0
        self.largest = float(self._in_flight.max(initial=1.0))

    def between(self, half_speed_at: float, lives: Floats) -> Floats:
        """Return the work clock's time of each life; `half_speed_at` 0: it runs as fast as clocks on walls."""
        wanting = np.maximum(self._in_flight[:-1] * self.decoding_share, 1.0)  # whoever looks is one of them
        decoding = np.minimum(wanting, self._max_sequences)
        rate = decoding / wanting  # those who wait for a place in the batch share the loss
        if half_speed_at:
            rate /= 1 + decoding / half_speed_at
        clock = np.concatenate([[0.0], np.cumsum(rate * self._seconds)])
        begun, ended = np.interp(lives[:, 0], self._times, clock), np.interp(lives[:, 1], self._times, clock)
        return np.asarray(ended - begun)


def _best(clock: _Clock, lives: Floats, *, told_apart: bool) -> float:
    """Return the half_speed_at that explains the lives best; 0 unless that is better: what cannot be seen is not assumed."""

    def misses(half_speed_at: float) -> float:
        work = clock.between(half_speed_at, lives)
        slope, rest = _line(work, lives[:, 2], told_apart=told_apart)
        return float(np.abs(work - slope * lives[:, 2] - rest).mean() / max(work.mean(), 1e-12))

    largest = clock.largest * clock.decoding_share
    candidates = [0.0, *np.geomspace(16 * largest, max(0.02 * largest, 0.25), 20)]
    found = [misses(candidate) for candidate in candidates]
    best = int(np.argmin(found))
    if found[0] <= found[best] * (1 + _WORTH_A_FALL) + 1e-4:
        return 0.0
    around = np.geomspace(candidates[max(1, best - 1)], candidates[min(best + 1, len(candidates) - 1)], 9)
    return float(min(around, key=misses))


def _line(work: Floats, sampled: Floats, *, told_apart: bool) -> tuple[float, float]:
    """Return slope and intercept, neither below 0, of the line with the least absolute deviations (reweighted least squares)."""
    if not told_apart:
        return float(np.median(work / sampled)), 0.0
    slope, rest = 0.0, float(np.median(work))
    weights = np.ones(len(work))
    for _ in range(25):
        total = weights.sum()
        x, y = (weights * sampled).sum() / total, (weights * work).sum() / total
        slope = float((weights * (sampled - x) * (work - y)).sum() / (weights * (sampled - x) ** 2).sum())
        rest = float(y - slope * x)
        weights = 1 / np.maximum(np.abs(work - slope * sampled - rest), 1e-4 * y)
    if rest < 0:  # through the origin: the median of work / sampled, by weight
        order = np.argsort(work / sampled)
        cumulated = np.cumsum(sampled[order])
        return float((work / sampled)[order][np.searchsorted(cumulated, cumulated[-1] / 2)]), 0.0
    return max(slope, 0.0), rest
