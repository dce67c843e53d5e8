"""What the closed forms expect of a scenario with its [rollout] keys as they stand, and what binds it.

Three things bound the cycle from below: the trainer, the engines (of which no more than max_concurrent rollouts are asked), and the gate
(steps_ahead). Latency grows with the load and the load falls with the cycle: `expect` looks for the most sequences per engine at which no
bound is broken; the one that the next sequence would break binds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from headway.planning import forms
from headway.planning.curves import Curve
from headway.planning.fleet import Demand, Fleet, Served, demand_of
from headway.settings import steps_ahead
from headway.settings.section import Section
from headway.sim.scenario import Scenario, drawn, tokens_of

Binding: TypeAlias = Literal["trainer", "engines", "max_concurrent", "gate", "wait"]
_GATE_COSTS = 1.05  # times the cycle without it: less, and it is not the gate to blame
_ENOUGH_MORE = 1.15  # twice as many in flight must bring so much, or it is the engines that bind


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


@dataclass(frozen=True, kw_only=True)
class Balance:
    """The steady state that was found, with the curves that figures are made of. `delay`, `residence`: see `forms`.

    `binding`: what the next rollout in flight would break; `costs`: what to name for it, where the gate does and lifting it brings little.
    """

    binding: Binding
    costs: Binding
    cycle: float
    train: float
    served: Served
    fed: float
    group_seconds: float
    delay: float
    residence: float


def groups_of(scenario: Scenario) -> float:
    """Return the groups of a batch; of one that is sized by tokens, what it takes on average."""
    rollout, workload = scenario.rollout, scenario.workload
    if not rollout.batch_tokens:
        return float(rollout.groups_per_batch)
    tokens = drawn(workload.prompt_tokens).mean + workload.observed_tokens * (workload.turns - 1) + tokens_of(scenario).mean
    return max(1.0, rollout.batch_tokens / (rollout.group_size * tokens))


def train_seconds(scenario: Scenario) -> float:
    """Return T: how long the trainer takes for a batch on average."""
    workload, training = scenario.workload, scenario.training
    seconds = drawn(training.seconds).mean
    if training.tokens_per_second:
        tokens = drawn(workload.prompt_tokens).mean + workload.observed_tokens * (workload.turns - 1) + tokens_of(scenario).mean
        seconds += groups_of(scenario) * scenario.rollout.group_size * tokens / training.tokens_per_second
    return seconds


def paced(scenario: Scenario) -> Scenario:
    """Return the scenario with the steps_ahead that "auto" comes to: E[L] / gamma + 1, as far ahead as S allows."""
    rollout = scenario.rollout
    if rollout.steps_ahead != "auto":
        return scenario
    free = msgspec.structs.replace(rollout, steps_ahead=float(rollout.max_staleness))
    state = balance(msgspec.structs.replace(scenario, rollout=free))
    ahead = forms.steps_ahead_needed(state.group_seconds, state.cycle, rollout.max_staleness)
    return msgspec.structs.replace(scenario, rollout=msgspec.structs.replace(rollout, steps_ahead=ahead))


def balance(scenario: Scenario) -> Balance:
    """Return the steady state of a scenario."""
    rollout = scenario.rollout
    demand = demand_of(scenario, groups_of(scenario))
    fleet = Fleet(scenario, demand)
    train, sync = train_seconds(scenario), drawn(scenario.fleet.sync_seconds).mean
    floor = forms.trainer_cycle(train, sync)
    full = fleet.filled(rollout.max_concurrent / scenario.fleet.engines)
    if rollout.on_stale == "wait":
        floor = max(floor, _waiting(scenario, full, train))
    binding: Binding = "wait" if floor > train and rollout.on_stale == "wait" else "trainer"
    served, cycle = full, fleet.cycle(full)
    ahead = _ahead(scenario)
    more = fleet.cycle(fleet.filled(2 * rollout.max_concurrent / scenario.fleet.engines))
    starving: Binding = "max_concurrent" if cycle / more > _ENOUGH_MORE else "engines"
    if cycle >= max(floor, gate(scenario, full, train, sync)):
        binding = starving
    else:
        low, high = 0.0, full.sequences
        for _ in range(40):
            middle = (low + high) / 2
            tried = fleet.with_sequences(middle)
            fits = fleet.cycle(tried) >= max(floor, gate(scenario, tried, train, sync))
            low, high = (middle, high) if fits else (low, middle)
        served = fleet.with_sequences(high)
        cycle = max(floor, gate(scenario, served, train, sync))
        binding = binding if cycle <= floor * (1 + 1e-6) else "gate"
    without = max(floor, fleet.cycle(full))
    costs = binding if binding != "gate" or cycle > _GATE_COSTS * without else starving if without > floor else "trainer"
    group = _group_seconds(scenario, served.latency)
    slack = 0.0
    if binding in {"trainer", "wait"}:
        slack = min(max(0.0, (ahead + 1 - forms.FORMING_WAIT) * cycle - train - sync - group), rollout.max_lead * cycle)
    delay = train + sync + slack
    own = group + forms.FORMING_WAIT * cycle
    residence = own if binding in {"engines", "max_concurrent"} else max(own, (ahead + 1) * cycle - delay)
    return Balance(
        binding=binding,
        costs=costs,
        cycle=cycle,
        train=train,
        served=served,
        fed=forms.trainer_cycle(train, sync) / fleet.cycle(full),
        group_seconds=group,
        delay=delay,
        residence=served.latency.largest_of(rollout.group_size).solve(residence - forms.FORMING_WAIT * cycle - _score_seconds(scenario)),
    )


def gate(scenario: Scenario, served: Served, train: float, sync: float) -> float:
    """Return the shortest cycle that steps_ahead allows at this latency; between A = 0 and A = 1 in proportion."""
    rollout, ahead = scenario.rollout, _ahead(scenario)
    group = _group_seconds(scenario, served.latency)
    if ahead >= 1:
        return forms.gate_cycle(group, train, sync, ahead)
    members = round(groups_of(scenario) * rollout.group_size)
    in_turn = forms.in_turn_cycle(served.latency, max(1, members), train, sync) + _score_seconds(scenario)
    return in_turn + ahead * (forms.gate_cycle(group, train, sync, 1.0) - in_turn)


def expect(scenario: Scenario) -> Expected:
    """Return what the closed forms say. Raises ConfigError for a distribution without a mean."""
    scenario = paced(scenario)
    state = balance(scenario)
    rollout, workload = scenario.rollout, scenario.workload
    latency, size, cycle = state.served.latency, rollout.group_size, state.cycle
    delay = state.delay + _score_seconds(scenario)
    in_turn = _ahead(scenario) == 0  # each batch has all that was started for it, by the version that it trains
    masks, bound = rollout.on_stale == "mask" and not in_turn, rollout.max_staleness
    reach = forms.stalest(
        latency, cycle, groups=round(scenario.run.steps * groups_of(scenario)), group_size=size, delay=delay, residence=state.residence
    )
    most = 0 if in_turn else reach if rollout.on_stale == "train" else min(bound, reach)
    beat = 0.0 if state.binding in {"engines", "max_concurrent"} else cycle  # groups start when a version comes, or whenever one ends
    shares = forms.staleness_shares(latency, cycle, most=most, group_size=size, delay=delay, residence=state.residence, beat=beat)
    masked = forms.masked_share(latency, bound, cycle, group_size=size, delay=delay, beat=beat) if masks else 0.0
    heads = forms.head_coverage(latency, bound, cycle, group_size=size, delay=delay, beat=beat) if masks else 1.0
    lost = 0.0
    if rollout.on_stale == "drop" and not in_turn:
        _, lost = forms.dropped(latency, bound, cycle, group_size=size, delay=delay - beat / 2)
    demand: Demand = demand_of(scenario, groups_of(scenario))
    rollouts = groups_of(scenario) * size
    useful = (1 - masked) * (1 - lost) * (1 - workload.zero_advantage_share) * min(1.0, rollouts / demand.rollouts)
    useful /= 1 - workload.zero_advantage_share if rollout.dynamic_sampling else 1.0  # those are in the demand
    trained = rollouts * tokens_of(scenario).mean * (1 - masked)
    trained *= 1.0 if rollout.dynamic_sampling else 1 - workload.zero_advantage_share
    return Expected(
        binding=state.costs,
        batches_per_hour=3600 / cycle,
        cycle_seconds=cycle,
        trainer_busy=min(1.0, state.train / cycle),
        train_seconds=state.train,
        engines_feed=state.fed,
        in_flight=_in_flight(scenario, state, demand),
        rollout_seconds=latency.mean,
        group_seconds=state.group_seconds,
        mean_staleness=float(shares @ np.arange(len(shares)) / max(float(shares.sum()), 1e-12)),
        max_staleness=most,
        masked_share=masked,
        head_coverage=heads,
        waste=1 - useful,
        trained_tokens_per_second=trained / cycle,
        needed=forms.rollouts_needed(demand.rollouts, latency.mean, cycle, size),
    )


def _in_flight(scenario: Scenario, state: Balance, demand: Demand) -> float:
    """Return the rollouts in flight, those included that wait for a place at an engine: as many as may, where engines cannot keep up."""
    most = float(scenario.rollout.max_concurrent)
    if state.binding in {"engines", "max_concurrent"}:
        return min(most, (_ahead(scenario) + 1) * demand.rollouts)
    return min(most, demand.rollouts * state.served.latency.mean / state.cycle)


def _ahead(scenario: Scenario) -> float:
    rollout = scenario.rollout
    return float(rollout.max_staleness) if rollout.enforce == "ship" else min(steps_ahead(rollout), float(rollout.max_staleness))


def _score_seconds(scenario: Scenario) -> float:
    return drawn(scenario.workload.score_seconds).mean


def _group_seconds(scenario: Scenario, latency: Curve) -> float:
    return latency.largest_of(scenario.rollout.group_size).mean + _score_seconds(scenario)


def _waiting(scenario: Scenario, served: Served, train: float) -> float:
    """Return the cycle of on_stale = "wait" at this load, by its recursion."""
    rollout = scenario.rollout
    seconds_per_token = served.sequences / (served.rate * tokens_of(scenario).mean)
    return forms.wait_cycle(
        tokens_of(scenario).scaled(seconds_per_token),
        np.random.default_rng(scenario.run.seed),
        groups=max(1, round(groups_of(scenario))),
        group_size=rollout.group_size,
        train_seconds=train,
        max_staleness=rollout.max_staleness,
    )
