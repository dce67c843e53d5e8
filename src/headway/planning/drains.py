"""engine.weight_sync = "wait" in averages: engines run empty before each sync, so that no rollout has tokens of two versions.

A sync cycle begins at u, when a version v is served: what admission has room for starts (batches up to v + A, less what is live), and
goes on at its engine. Once there is a newer version nothing new starts, and when the longest rollout, M, has ended engines take the newest
version that there is, for W seconds. Of n groups that start together the i-th has ended after the i / n quantile of a group's latency. So
batches have their times by a recursion, which is run (as that of on_stale = "wait" in `forms`):

    batch k is full when the groups before it in order of birth have ended, trained T after max(full, batch k - 1 trained)
    z = E[max(version v + 1 trained, u + M)],  v' = the newest version trained at z,  u' = z + W

While an engine runs empty those that are left get faster: of n that start together on an engine with `half_speed_at` h a rollout of x
tokens takes (x + n E[min(X, x)] / h) / speed, for all that the engine wrote until then is known. Where there is room for f only, the others
start as places become free, until the newer version is there, s seconds on: one ends every E[L] / f seconds, and what is left of the last f
is that of renewals which began together, P(R > x) = P(X > s + x) + (E[(X - x)+] - E[(X - x - s)+]) / E[X]; they get faster in the same way.

All that began under v has ended before the next version is served, and is used oldest first by batch v + A at the latest: nothing is ever
staler than A, so nothing is masked, dropped or waited for (max_staleness is at least A). Long rollouts end last, so more tokens than
rollouts are near A.

Not told: engine.sync_order = "rolling" with several engines, of which one at a time runs empty, and enforce = "ship".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headway.planning.curves import Curve
from headway.planning.fleet import Demand, Fleet, Served
from headway.sim.distributions import Floats
from headway.sim.scenario import Scenario, drawn

_CYCLES, _WARM_UP = 48, 16
_MOST_AHEAD = 1024.0
_POINTS = 256  # of a cycle's groups that are told apart, about


@dataclass(frozen=True, kw_only=True)
class Drained:
    """A steady state. `cycle`: between versions; `shares`: of tokens at each staleness; `burst`: rollouts that start in one sync cycle.

    `starved`: there is no room for all of them at once. `fastest`: the cycle of a trainer that takes no time.
    """

    cycle: float
    fastest: float
    shares: Floats
    burst: float
    starved: bool
    served: Served


def drains(scenario: Scenario) -> bool:
    """Whether engines run empty at each sync, in the way that is told here."""
    fleet = scenario.fleet
    at_once = fleet.sync_order == "all_at_once" or fleet.engines == 1
    return fleet.weight_sync == "wait" and at_once and scenario.rollout.enforce == "admission"


def drained(scenario: Scenario, demand: Demand, *, train: float, ahead: float) -> Drained:
    """Return the steady state for steps_ahead of 1 or more."""
    engines, ahead = _Engines(scenario, demand), min(ahead, _MOST_AHEAD)
    cycle, shares, at_once = _played(engines, train, ahead)
    latency = engines.latency(at_once)
    rate = demand.rollouts / cycle / scenario.fleet.engines
    return Drained(
        cycle=cycle,
        fastest=_played(engines, 0.0, ahead)[0],
        shares=shares,
        burst=at_once * demand.rollouts,
        starved=at_once * demand.rollouts > engines.room,
        served=Served(sequences=rate * latency.mean, rate=rate, in_flight=rate * latency.mean, latency=latency),
    )


def _played(engines: _Engines, train: float, ahead: float) -> tuple[float, Floats, float]:
    """Run the recursion; return the seconds between versions, the shares of each staleness, and batches that start in one sync cycle.

    A batch has `points` parts. Those that wait stand in order of birth: under which version they began, when they ended, their tokens.
    """
    points = max(2, round(_POINTS / (ahead + 1)))
    waiting = np.empty((3, 0))
    trained: list[float] = []  # when each version was, from 1 on
    shares = np.zeros(math.ceil(ahead) + 2)
    version, served = 0, 0.0
    began, marks = [], []
    for cycle in range(_CYCLES):
        new = max(0, math.floor((version + ahead + 1) * points + 1e-9) - len(trained) * points - waiting.shape[1])
        ended = engines.ends(new, points, math.inf)
        if engines.starved(new / points):
            known = len(trained) > version
            after = trained[version] if known else _next(trained, np.append(waiting[1], served + ended.times)[points - 1], train)
            ended = engines.ends(new, points, max(0.0, after - served))
        begun = np.stack((np.full(len(ended.times), float(version)), served + ended.times, ended.tokens))
        waiting = np.concatenate((waiting, begun), axis=1)
        began.append(begun.shape[1] / points)
        while waiting.shape[1] >= points:
            births, times, tokens = waiting[:, :points]
            if cycle >= _WARM_UP:
                np.add.at(shares, (len(trained) - births).astype(np.int64), tokens)
            trained.append(_next(trained, float(times.max()), train))
            waiting = waiting[:, points:]
        until = max(trained[version], served)
        until += ended.longest.excess(until - served - ended.since) if new else 0.0
        version, served = int(np.searchsorted(trained, until + 1e-9)), until + engines.sync
        marks.append((served, version))
    (first, before), (last, after_all) = marks[_WARM_UP], marks[-1]
    return max(train, (last - first) / (after_all - before)), shares / shares.sum(), float(np.mean(began[_WARM_UP:]))


def _next(trained: list[float], full: float, train: float) -> float:
    return max(full, trained[-1] if trained else 0.0) + train


class _Ended(NamedTuple):
    """What starts in a sync cycle: when its parts end, ascending, their tokens (about 1 on average); `since` + `longest`: when all have."""

    times: Floats
    tokens: Floats
    since: float
    longest: Curve


class _Engines:
    """When what starts in a sync cycle ends, in seconds from its beginning. `room`: rollouts that can run at once."""

    def __init__(self, scenario: Scenario, demand: Demand) -> None:
        fleet = scenario.fleet
        self._admitted = float(scenario.rollout.max_concurrent)
        self.room = min(self._admitted, fleet.engines * Fleet(scenario, demand).most_sequences)
        self.sync = drawn(fleet.sync_seconds).mean
        self._fleet = fleet
        self._demand = demand
        self._size = scenario.rollout.group_size
        self._score = drawn(scenario.workload.score_seconds).mean
        self._together: dict[float, _Ended] = {}

    def starved(self, batches: float) -> bool:
        """Whether so many batches cannot all start at once."""
        return batches * self._demand.rollouts > self.room

    def latency(self, batches: float) -> Curve:
        """Return how long a rollout takes where so many batches start in a sync cycle."""
        fleet, rollouts = self._fleet, batches * self._demand.rollouts
        each, load = min(rollouts, self.room) / fleet.engines, self._load(rollouts)
        prefilled = self._demand.prompt_tokens + self._demand.observed_tokens
        beside = self._demand.tool_seconds
        if fleet.prefill_tokens_per_second:
            beside += each * prefilled / fleet.prefill_tokens_per_second
        curve = self._demand.tokens
        if rollouts > self.room:
            return curve.moved((1 + load) / fleet.tokens_per_second, beside)
        return _faster_at_the_end(curve, load).moved(1 / fleet.tokens_per_second, beside)

    def _load(self, rollouts: float) -> float:
        """Return n / half_speed_at, n being what an engine writes of so many, as far as there is room."""
        fleet = self._fleet
        return min(rollouts, self.room) / fleet.engines / fleet.half_speed_at if fleet.half_speed_at else 0.0

    def ends(self, new: int, points: int, open_seconds: float) -> _Ended:
        """Return what becomes of `new` parts of batches; where not all can start at once nothing does after `open_seconds`."""
        batches = new / points
        if self.starved(batches):
            return self._as_there_is_room(new, points, open_seconds)
        if batches not in self._together:
            latency = self.latency(batches)
            longest = latency.largest_of(max(1, round(batches * self._demand.rollouts)))
            times = np.minimum(_quantiles(latency.largest_of(self._size), (np.arange(new) + 0.5) / max(new, 1)), longest.mean)
            shorter = np.interp(times, latency.edges, _written(latency)) - times * latency.at(times)
            tokens = (times + (self._size - 1) * shorter / np.maximum(1.0 - latency.at(times), 1e-9)) / self._size
            self._together[batches] = _Ended(times + self._score, tokens / latency.mean, 0.0, longest)
        return self._together[batches]

    def _as_there_is_room(self, new: int, points: int, open_seconds: float) -> _Ended:
        rollouts, part = new / points * self._demand.rollouts, self._demand.rollouts / points
        latency = self.latency(new / points)
        group = latency.largest_of(self._size).mean - latency.mean + self._score
        pace = latency.mean * part / self.room  # seconds in which a part ends
        every = (rollouts / self.room - 1.0) * latency.mean
        since = min(open_seconds, every) if rollouts > self._admitted else every  # what waits in an engine's queue is started already
        before = min(new - 1, int(since / pace))
        load = self._load(rollouts)
        left = _faster_at_the_end(_left(latency, since).moved(1 / (1 + load)), load)
        flying = max(1, min(new - before, round(self.room / part)))
        times = np.append((np.arange(before) + 1) * pace, since + _quantiles(left, (np.arange(flying) + 0.5) / flying))
        long = (left.mean + min(since, left.mean)) / latency.mean  # what runs at some instant is longer than what begins
        short = max(0.1, (before + flying * (1.0 - long)) / before) if before else 1.0
        tokens = np.append(np.full(before, short), np.full(flying, long))
        return _Ended(times + group, tokens, since, left.largest_of(max(1, round(self.room))))


def _quantiles(curve: Curve, shares: Floats) -> Floats:
    """Return below which times such shares lie."""
    middle = (curve.edges[1:] + curve.edges[:-1]) / 2
    return np.asarray(np.interp(shares, 1.0 - curve.above, middle))


def _left(curve: Curve, since: float) -> Curve:
    """Return what is left of a rollout when renewals that began together have gone on for so long; the curve itself for 0."""
    if since <= 0:
        return curve
    edges, written = curve.edges, _written(curve)

    def excess(x: Floats) -> Floats:
        return np.asarray(written[-1] - np.interp(x, edges, written))

    middle = (edges[1:] + edges[:-1]) / 2
    renewed = (excess(middle) - excess(middle + since)) / curve.mean
    return Curve(edges, np.minimum(1.0, curve.at(middle + since) + renewed), 0.0)


def _faster_at_the_end(curve: Curve, load: float) -> Curve:
    """Return how long those that start together take, at a speed of 1: x + load E[min(X, x)], load = n / half_speed_at."""
    return Curve(curve.edges + load * _written(curve), curve.above, curve.rest) if load else curve


def _written(curve: Curve) -> Floats:
    """Return E[min(X, x)] at the curve's edges."""
    return np.concatenate(([0.0], np.cumsum(curve.above * np.diff(curve.edges))))
