"""What the closed forms expect of a scenario with its [rollout] keys as they stand: rates, staleness, masked tokens, waste.

How long a cycle is and what binds it: `balance`. Here its figures are made of it, by `forms`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from headway.planning import forms
from headway.planning.balance import Balance, Binding, balance, fresh, groups_of, paced, score_seconds, steps_in_force
from headway.planning.fleet import Demand, demand_of
from headway.planning.shipping import Queue, thrown_away
from headway.settings.section import Section
from headway.sim.distributions import Floats
from headway.sim.scenario import Scenario, tokens_of


class Expected(Section, frozen=True, kw_only=True):
    """What is expected of a scenario: seconds, versions, shares of 1.

    `cycle_seconds`: between versions. `engines_feed`: how many times as fast as the trainer the engines alone could feed it with what may
    be in flight. `in_flight`: rollouts on average. `mean_staleness`, `max_staleness`: of trained tokens. `waste`: sampled tokens that train
    nothing (masked ones, groups that score alike, failed attempts). `needed`: max_concurrent by Little's law, with a margin.
    """

    binding: Binding
    batches_per_hour: float
    cycle_seconds: float
    trainer_busy: float
    train_seconds: float
    engines_feed: float
    in_flight: float
    rollout_seconds: float
    group_seconds: float
    mean_staleness: float
    max_staleness: int
    masked_share: float
    head_coverage: float
    waste: float
    trained_tokens_per_second: float
    needed: int


class _Ages(NamedTuple):
    """What a balance makes of tokens: `lost`, the share of those sampled that go with whole groups, `masked` of the others."""

    mean: float
    most: int
    masked: float
    heads: float
    lost: float


def expect(scenario: Scenario) -> Expected:
    """Return what the closed forms say. Raises ConfigError for a distribution without a mean."""
    scenario = paced(scenario)
    state = balance(scenario)
    rollout, workload = scenario.rollout, scenario.workload
    size, cycle = rollout.group_size, state.cycle
    ages = _ages(scenario, state)
    demand = demand_of(scenario, groups_of(scenario))
    rollouts = groups_of(scenario) * size
    useful = (1 - ages.masked) * (1 - ages.lost) * (1 - workload.zero_advantage_share) * min(1.0, rollouts / demand.rollouts)
    useful /= 1 - workload.zero_advantage_share if rollout.dynamic_sampling else 1.0  # those are in the demand
    trained = rollouts * tokens_of(scenario).mean * (1 - ages.masked)
    trained *= 1.0 if rollout.dynamic_sampling else 1 - workload.zero_advantage_share
    needed = forms.rollouts_needed(demand.rollouts, state.served.latency.mean, cycle, size)
    if state.emptied is not None:
        needed = max(needed, math.ceil(state.emptied.burst / size) * size)
    return Expected(
        binding=state.costs,
        batches_per_hour=3600 / cycle,
        cycle_seconds=cycle,
        trainer_busy=min(1.0, state.train / cycle),
        train_seconds=state.train,
        engines_feed=state.fed,
        in_flight=_in_flight(scenario, state, demand),
        rollout_seconds=state.served.latency.mean,
        group_seconds=state.group_seconds,
        mean_staleness=ages.mean,
        max_staleness=ages.most,
        masked_share=ages.masked,
        head_coverage=ages.heads,
        waste=1 - useful,
        trained_tokens_per_second=trained / cycle,
        needed=needed,
    )


def _ages(scenario: Scenario, state: Balance) -> _Ages:
    if steps_in_force(scenario) == 0:  # each batch has all that was started for it, by the version that it trains
        return _Ages(0.0, 0, 0.0, 1.0, 0.0)
    if state.emptied is not None:
        shares = state.emptied.shares
        return _Ages(_mean(shares), int(np.flatnonzero(shares)[-1]), 0.0, 1.0, 0.0)
    rollout, latency, cycle = scenario.rollout, state.served.latency, state.cycle
    size, bound, delay = rollout.group_size, rollout.max_staleness, state.delay + score_seconds(scenario)
    groups = round(scenario.run.steps * groups_of(scenario))
    reach = forms.stalest(latency, cycle, groups=groups, group_size=size, delay=delay, residence=state.residence)
    most = reach if rollout.on_stale == "train" else min(bound, reach)
    at_any_time = state.queue is not None or state.binding in {"engines", "max_concurrent"}
    beat = 0.0 if at_any_time else cycle  # groups start when a version comes, or whenever one ends
    shares = forms.staleness_shares(latency, cycle, most=most, group_size=size, delay=delay, residence=state.residence, beat=beat)
    masked, heads, lost = 0.0, 1.0, 0.0
    if rollout.on_stale == "mask":
        masked = forms.masked_share(latency, bound, cycle, group_size=size, delay=delay, beat=beat)
        heads = forms.head_coverage(latency, bound, cycle, group_size=size, delay=delay, beat=beat)
    if rollout.on_stale == "drop":
        _, lost = forms.dropped(latency, bound, cycle, group_size=size, delay=delay - beat / 2)
    if state.queue is not None and state.queue.spoils:
        masked, heads, lost = _spoilt(scenario, state, state.queue)
    return _Ages(_mean(shares), most, masked, heads, lost)


def _spoilt(scenario: Scenario, state: Balance, queue: Queue) -> tuple[float, float, float]:
    """Return masked share, head coverage and the share of tokens lost with groups where what waits grows too old (`shipping`)."""
    latency, size, age = state.served.latency, scenario.rollout.group_size, fresh(scenario, state.cycle, state.delay)
    if scenario.rollout.on_stale == "drop":
        groups, tokens = forms.dropped(latency, scenario.rollout.max_staleness, state.cycle, group_size=size, delay=state.delay)
        return 0.0, 1.0, 1.0 - (1.0 - tokens) * min(1.0, queue.trained_share / max(1.0 - groups, 1e-9))
    lost = thrown_away(latency, size, queue.shortest)
    return (forms.older(latency, size, age, queue.residence) - lost) / max(1.0 - lost, 1e-9), 0.0, lost


def _mean(shares: Floats) -> float:
    return float(shares @ np.arange(len(shares)) / max(float(shares.sum()), 1e-12))


def _in_flight(scenario: Scenario, state: Balance, demand: Demand) -> float:
    """Return the rollouts in flight, those included that wait for a place at an engine: as many as may, where engines cannot keep up."""
    most = float(scenario.rollout.max_concurrent)
    if state.queue is not None and state.queue.spoils:
        return min(most, demand.rollouts * state.served.latency.mean / state.cycle / state.queue.trained_share)
    if state.binding == "max_concurrent" or (state.binding == "engines" and state.emptied is None):
        return min(most, (steps_in_force(scenario) + 1) * demand.rollouts)
    return min(most, demand.rollouts * state.served.latency.mean / state.cycle)
