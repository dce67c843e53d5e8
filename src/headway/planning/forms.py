"""The closed forms of STALENESS.md: how long a cycle is, how stale tokens become, how many are masked, how much must be in flight.

Pure: curves and numbers in, numbers out, in seconds and versions. Each formula says where it is from and how far the simulation was from
it. What they leave out (that cycles differ, that arrivals bunch) is what plans are simulated for.

Words: `latency` is the curve of one rollout, from its first token to its last; a group's is the largest of its members'. `cycle` is the
mean time between versions, gamma. `delay`: seconds from the forming of a batch to when the version that it makes is served; with a trainer
that is always busy and no batch formed ahead that is one cycle.
"""

from __future__ import annotations

import math

import numpy as np

from headway.planning.curves import Curve, curve_of
from headway.rules.pacing import steps_needed
from headway.sim.distributions import Floats, Given

FORMING_WAIT = 0.5  # of a cycle: how long a complete group waits for its batch on average, when nothing is ready ahead
_MOST_BEATS = 4096.0  # that are told apart; what is older than so many versions is old enough
MARGIN = 1.25  # of Little's number: so many more may be in flight, since arrivals bunch


def trainer_cycle(train_seconds: float, sync_seconds: float) -> float:
    """Return the shortest cycle of a trainer that always has a batch: max(T, W).

    STALENESS.md says T + W, of a trainer that stands still during a sync; here the next batch begins at once, and weights reach the engines
    meanwhile. Exact without jitter.
    """
    return max(train_seconds, sync_seconds)


def gate_cycle(
    group_latency: float, train_seconds: float, sync_seconds: float, steps_ahead: float, *, waiting: float = FORMING_WAIT
) -> float:
    """Return the shortest cycle that admission allows: (E[L] + T + W) / (A + 1 - waiting).

    A group admitted at version v is in batch v + A or before: its quota opens A + 1 cycles before that batch's version is served.
    `waiting` 0 is the formula of STALENESS.md, too short by up to a third for small A, since complete groups wait for their batch; with
    half a cycle within 5 % of the simulation for A >= 2, at A = 1 within a third (a few very long groups hold places of the quota).
    """
    return (group_latency + train_seconds + sync_seconds) / (steps_ahead + 1 - waiting)


def in_turn_cycle(latency: Curve, rollouts: int, train_seconds: float, sync_seconds: float) -> float:
    """Return the cycle of A = 0, generating and training in turn: E[max over all rollouts of a batch] + T + W. Exact."""
    return latency.largest_of(rollouts).mean + train_seconds + sync_seconds


def rollouts_needed(rollouts: float, latency_mean: float, cycle: float, group_size: int, *, margin: float = MARGIN) -> int:
    """Return the max_concurrent that never starves a trainer with this cycle: 1.25 B G E[Lm] / gamma, in whole groups.

    STALENESS.md, knobs. More buys nothing once the gate binds; without the margin the trainer waits a few per cent of the time.
    """
    return max(1, math.ceil(margin * rollouts * latency_mean / cycle / group_size - 1e-9)) * group_size


def steps_ahead_needed(group_latency: float, cycle: float, max_staleness: int) -> float:
    """Return A = E[L] / gamma + 1, up to the next half, at most S: the same rate as A = S, with younger tokens.

    As `steps_ahead = "auto"` chooses it (`rules.pacing`).
    """
    return min(math.ceil(2 * steps_needed(group_latency, cycle) - 1e-9) / 2, float(max_staleness))


def zero_waste_staleness(longest: float, cycle: float, delay: float = 0.0) -> int | None:
    """Return the S at which nothing is ever masked, dropped or waited for: ceil((Lmax + delay) / gamma); None: there is no longest rollout.

    STALENESS.md has it without a delay: batches that are trained and served as soon as they are formed.
    """
    return math.ceil((longest + delay) / cycle - 1e-9) if math.isfinite(longest) else None


def youngest_masked(max_staleness: float, cycle: float, delay: float | None = None) -> float:
    """Return the age in seconds, at the end of its group, from which a token is too stale: (S + 1/2) gamma - delay.

    With the usual delay of one cycle that is STALENESS.md's (S - 1/2) gamma. The half: groups end anywhere between two batches.
    """
    return (max_staleness + 0.5) * cycle - (cycle if delay is None else delay)


def older(latency: Curve, group_size: int, age: float, residence: float = 0.0, *, beat: float = 0.0) -> float:
    """Return the share of tokens that are older than `age` when their group leaves: E[min(Lm, (R - age)+)] / E[Lm], R = max(residence, L).

    `residence`: a group that ends sooner stays so long all the same, for others are before it. E over a member and the slowest of its
    group: the integral over u of P(Lm > u, R > age + u). For one member and no residence that is E[(L - age)+] / E[L].

    `beat`: groups are admitted when a version comes, and only then, every so many seconds: the gate does so, engines that take the next
    group whenever one ends do not (0). Then tokens written between two versions grow old at once: u is rounded up to whole beats.
    """
    end = latency.edges[-1]
    beats = np.arange(1.0, min(end / beat, _MOST_BEATS)) * beat if beat else np.empty(0)
    cuts = np.concatenate((latency.edges, latency.edges - age, [residence - age], beats))
    cuts = np.unique(np.concatenate(([0.0], cuts[(cuts > 0) & (cuts < end)], [end])))
    middle = (cuts[1:] + cuts[:-1]) / 2
    reach = middle + age
    if beat:
        reach = np.where(middle < _MOST_BEATS * beat, age + beat * (np.ceil(middle / beat) - 0.5), reach)
    mine, late = latency.at(middle), np.minimum(latency.at(reach), latency.at(middle))
    others = 1.0 - (1.0 - np.where(reach < middle, 1.0, late)) ** (group_size - 1)
    both = np.where(reach < np.maximum(residence, middle), mine, late + (mine - late) * others)
    return min(1.0, (float(both @ np.diff(cuts)) + latency.rest) / latency.mean)


def masked_share(
    latency: Curve, max_staleness: int, cycle: float, *, group_size: int = 1, delay: float | None = None, beat: float = 0.0
) -> float:
    """Return the share of sampled tokens that are masked: for G = 1, E[(L - (S - 1/2) gamma)+] / E[L].

    STALENESS.md, knobs. With the real `delay` and `beat` within 10 % of the simulation, 25 % where the tail has no variance. Early members
    of a group age while its slowest runs: the masked part of a member is min(Lm, (L - (S - 1/2) gamma)+).
    """
    return older(latency, group_size, youngest_masked(max_staleness, cycle, delay), beat=beat)


def head_coverage(
    latency: Curve, max_staleness: int, cycle: float, *, group_size: int = 1, delay: float | None = None, beat: float = 0.0
) -> float:
    """Return the share of rollouts whose first token is within S: P(L <= (S - 1/2) gamma), L the group's; half a beat later with one.

    Within half a point of the simulation.
    """
    return float(1.0 - latency.largest_of(group_size).at(youngest_masked(max_staleness, cycle, delay) + beat / 2))


def stalest(latency: Curve, cycle: float, *, groups: int, group_size: int = 1, delay: float | None = None, residence: float = 0.0) -> int:
    """Return the staleness that one token in a run of so many groups is expected to reach, were there no bound."""
    edges, above = latency.edges, latency.largest_of(group_size).above
    reached = np.flatnonzero(above * groups > 1)
    longest = max(residence, float(edges[reached[-1] + 1]) if len(reached) else 0.0)
    return max(0, round((longest + (cycle if delay is None else delay)) / cycle))


def staleness_shares(
    latency: Curve,
    cycle: float,
    *,
    most: int,
    group_size: int = 1,
    delay: float | None = None,
    residence: float = 0.0,
    beat: float = 0.0,
) -> Floats:
    """Return the share of sampled tokens at each staleness 0..most, counted before any masking; what is staler is in none.

    A token of that age at its group's end is trained (age + delay) / gamma versions on, rounded by where in a cycle that falls. Their mean
    is within .15 of the simulation, in lognormal, Pareto, uniform and two-point worlds, at any A above 0.
    """
    beyond = [older(latency, group_size, youngest_masked(s, cycle, delay), residence, beat=beat) for s in range(most + 1)]
    return -np.diff(np.array([1.0, *beyond]))


def dropped(latency: Curve, max_staleness: int, cycle: float, *, group_size: int = 1, delay: float | None = None) -> tuple[float, float]:
    """Return, for on_stale = "drop", the share of groups that are cancelled, and of the sampled tokens that are lost with them.

    A group is cancelled when its deadline comes, (S - 1/2) gamma after its birth, and has written until then. Within a third.
    """
    age = youngest_masked(max_staleness, cycle, delay)
    if age <= 0:
        return 1.0, 1.0
    cuts = np.append(latency.edges[latency.edges < age], age)
    mine = latency.at((cuts[1:] + cuts[:-1]) / 2)
    late = float(latency.at(age))
    fast = (1.0 - late) ** (group_size - 1)
    written = np.diff(cuts)
    lost = float(written @ (late + np.maximum(mine - late, 0.0) * (1.0 - fast)))
    kept = float(written @ np.maximum(mine - late, 0.0)) * fast
    return 1.0 - fast * (1.0 - late), lost / max(lost + kept, 1e-12)


def wait_cycle(given: Given, rng: np.random.Generator, *, groups: int, group_size: int, train_seconds: float, max_staleness: int) -> float:
    """Return the cycle of on_stale = "wait": t_k = max(t_{k-1} + T, t_{k-S-1} + T + max over the batch of L), mean over 300 draws.

    STALENESS.md, knobs: it is run, since the simple bound is twice too optimistic. Batch k's groups start once version k - S - 1 is there.
    Too long by 10 to 20 % beside the simulation.
    """
    batches, warm_up = 300, 50
    slowest = curve_of(given).largest_of(groups * group_size)
    longest = np.interp(rng.random(batches), 1.0 - slowest.above, (slowest.edges[1:] + slowest.edges[:-1]) / 2).tolist()
    times: list[float] = []
    for k in range(batches):
        before = times[-1] if times else 0.0
        begun = times[k - max_staleness - 1] if k > max_staleness else 0.0
        times.append(max(before + train_seconds, begun + train_seconds + longest[k]))
    return (times[-1] - times[warm_up - 1]) / (batches - warm_up)
