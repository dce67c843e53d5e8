"""enforce = "ship" in closed form, where engines are faster than the trainer: complete groups wait in a queue, oldest first.

Nothing closes the gate but the bound on ready groups, N. With it the queue holds N groups, of which a batch takes B in a cycle gamma, so a
group stays for R = max(theta, L), its own latency L or theta, whichever is longer:

    E[max(theta, L)] - E[L] = N gamma / B

That is so while what waits is young enough: theta up to w = (S + 1/2) gamma - delay, the age from which a token is too stale. Where N is
larger (by default it is (S + 1) B, and w is less than S cycles), groups grow too old before their turn comes and are thrown away: engines
write for nothing. They end rho times as many groups as are trained, then:

    mask   those that are shorter than Q, P(L > Q) = 1 / rho, are too old before they are the oldest; theta = w + Q. Of the others what
           was written in the last w seconds trains, and never the first tokens
    drop   all are thrown away at the age w from their birth, 1 / rho of them has been trained by then; a group writes for min(L, w)

rho is what engines do when they are full, or less: what waits, w - E[(L - Q)+] + E[(L - theta)+] seconds a group, is N groups at most.
These two are averages of what comes in bursts (by chance first tokens are trained on all the same), and rough: up to a quarter of all
tokens away from the simulation. That it must not come to this, and which N is small enough, is sure: `largest_queue`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from headway.planning.curves import Curve
from headway.sim.scenario import Scenario

_HALVINGS = 30


@dataclass(frozen=True, kw_only=True)
class Queue:
    """How long a group stays at least (theta), and whether what waits grows too old (`spoils`), with Q (`shortest`) and 1 / rho."""

    residence: float
    spoils: bool
    shortest: float = 0.0
    trained_share: float = 1.0


def queue_of(scenario: Scenario, latency: Curve, full: Curve, *, groups: float, cycle: float, full_cycle: float, fresh: float) -> Queue:
    """Return the queue of a trainer that is busy all the time.

    `latency`: of a rollout where engines write no more than is trained; `full`: where they are full, and end a batch in `full_cycle`
    seconds. `fresh`: w, seconds.
    """
    rollout = scenario.rollout
    group = latency.largest_of(rollout.group_size)
    most = rollout.max_ready_groups or (rollout.max_staleness + 1) * groups
    residence = group.solve(group.mean + most * cycle / groups)
    if rollout.on_stale == "train" or residence <= fresh:
        return Queue(residence=residence, spoils=False)
    fresh = max(0.0, fresh)
    whole, drops = full.largest_of(rollout.group_size), rollout.on_stale == "drop"

    def state(share: float) -> tuple[float, float]:
        """Return Q, and how many groups wait, where so large a share of the groups that end is trained."""
        shortest = 0.0 if drops else _exceeded(whole, share)
        waits = fresh - whole.excess(shortest) + whole.excess(fresh + shortest)  # a group, on average: 0 for those longer than theta
        return shortest, waits * groups / (cycle * share)

    share = min(1.0, full_cycle / cycle)
    if drops:  # what is cut short makes place sooner
        share = min(1.0, share * (1.0 - full.excess(fresh) / full.mean))
    low, high = share, 1.0
    if state(low)[1] > most:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if state(middle)[1] > most else (low, middle)
        share = high
    shortest = state(share)[0]
    return Queue(residence=fresh + shortest, spoils=True, shortest=shortest, trained_share=max(share, 1e-6))


def largest_queue(latency: Curve, group_size: int, *, groups: float, cycle: float, fresh: float) -> int:
    """Return the most ready groups at which none grows too old before its turn; 0: any would."""
    group = latency.largest_of(group_size)
    return max(0, math.floor((max(0.0, fresh) + group.excess(max(0.0, fresh)) - group.mean) * groups / cycle))


def thrown_away(latency: Curve, group_size: int, shortest: float) -> float:
    """Return the share of the tokens that are in groups of which no member is longer than `shortest`."""
    if shortest <= 0:
        return 0.0
    above = float(latency.at(shortest))
    mine = latency.mean - latency.excess(shortest) - shortest * above
    return max(0.0, mine) * (1.0 - above) ** (group_size - 1) / latency.mean


def _exceeded(curve: Curve, share: float) -> float:
    """Return what that share of a curve is above."""
    middle = (curve.edges[1:] + curve.edges[:-1]) / 2
    return float(np.interp(1.0 - share, 1.0 - curve.above, middle)) if share < 1 else 0.0
