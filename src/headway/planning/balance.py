"""The steady state of a scenario with its [rollout] keys as they stand: how long a cycle is, what binds it, how loaded engines are.

Three things bound the cycle from below: the trainer, the engines (of which no more than max_concurrent rollouts are asked), and the gate
(steps_ahead). Latency grows with the load and the load falls with the cycle: `balance` looks for the most sequences per engine at which no
bound is broken; the one that the next sequence would break binds. Where engines run empty at each sync it is another one (`drains`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from headway.planning import forms
from headway.planning.curves import Curve
from headway.planning.drains import Drained, drained, drains
from headway.planning.fleet import Demand, Fleet, Served, demand_of
from headway.planning.shipping import Queue, queue_of
from headway.settings import steps_ahead
from headway.settings.rollout import smallest_batch
from headway.sim.scenario import Scenario, drawn, tokens_of

Binding: TypeAlias = Literal["trainer", "engines", "max_concurrent", "gate", "wait", "sync"]
_GATE_COSTS = 1.05  # times the cycle without it: less, and it is not the gate to blame
_ABOUT = 1.1  # whole groups are in flight: a limit is rarely met exactly
_ENOUGH_MORE = 1.15  # twice as many in flight must bring so much, or it is the engines that bind


@dataclass(frozen=True, kw_only=True)
class Balance:
    """The steady state that was found, with the curves that figures are made of. `delay`, `residence`: see `forms`.

    `binding`: what the next rollout in flight would break; `costs`: what to name for it, where the gate does and lifting it brings little.
    `emptied`: where engines run empty at each sync, the state of that. `queue`: of ready groups that only their number holds back.
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
    emptied: Drained | None = None
    queue: Queue | None = None


def groups_of(scenario: Scenario) -> float:
    """Return the groups of a batch; of one that is sized by tokens, what it takes on average, and no more than may be admitted for it."""
    rollout, workload = scenario.rollout, scenario.workload
    if not rollout.batch_tokens:
        return float(rollout.groups_per_batch)
    tokens = drawn(workload.prompt_tokens).mean + workload.observed_tokens * (workload.turns - 1) + tokens_of(scenario).mean
    groups = max(1.0, rollout.batch_tokens / (rollout.group_size * tokens))
    if rollout.enforce == "ship":
        return groups
    most = float(rollout.max_staleness)
    ahead = most if rollout.steps_ahead == "auto" else min(steps_ahead(rollout), most)
    return min(groups, max(1, smallest_batch(rollout)) * (math.floor(ahead) + 1.0))


def in_batches_admitted(scenario: Scenario, ahead: float) -> float:
    """Return the steps_ahead at which admission lets as many groups live as are in `ahead` + 1 batches: it counts the smallest batches."""
    rollout = scenario.rollout
    if not rollout.batch_tokens or rollout.enforce == "ship":
        return ahead
    return max(0.0, (ahead + 1.0) * max(1.0, groups_of(scenario) / max(1, smallest_batch(rollout))) - 1.0)


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
    if drains(scenario):
        return _emptied(scenario, demand, fleet, train)
    floor = forms.trainer_cycle(train, sync)
    full = fleet.filled(rollout.max_concurrent / scenario.fleet.engines)
    if rollout.on_stale == "wait":
        floor = max(floor, _waiting(scenario, full, train))
    binding: Binding = "wait" if floor > train and rollout.on_stale == "wait" else "trainer"
    served, cycle = full, fleet.cycle(full)
    ahead = steps_in_force(scenario)
    more = fleet.cycle(fleet.filled(2 * rollout.max_concurrent / scenario.fleet.engines))
    filled = rollout.max_concurrent * _ABOUT >= fleet.most_in_flight * scenario.fleet.engines
    starving: Binding = "max_concurrent" if cycle / more > _ENOUGH_MORE and not filled else "engines"
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
    if rollout.enforce == "ship" and binding == "trainer":
        return _shipped(scenario, served, full, cycle=cycle, full_cycle=fleet.cycle(full), delay=delay)
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
        residence=served.latency.largest_of(rollout.group_size).solve(residence - forms.FORMING_WAIT * cycle - score_seconds(scenario)),
    )


def _shipped(scenario: Scenario, served: Served, full: Served, *, cycle: float, full_cycle: float, delay: float) -> Balance:
    """Return the steady state of a trainer that is busy all the time, with a queue of ready groups before it."""
    train = train_seconds(scenario)
    age = fresh(scenario, cycle, delay)
    queue = queue_of(scenario, served.latency, full.latency, groups=groups_of(scenario), cycle=cycle, full_cycle=full_cycle, fresh=age)
    served = full if queue.spoils else served
    return Balance(
        binding="trainer",
        costs="trainer",
        cycle=cycle,
        train=train,
        served=served,
        fed=cycle / full_cycle,
        group_seconds=_group_seconds(scenario, served.latency),
        delay=delay,
        residence=queue.residence,
        queue=queue,
    )


def fresh(scenario: Scenario, cycle: float, delay: float) -> float:
    """Return the age, when a group is complete, from which a token is too stale."""
    return forms.youngest_masked(scenario.rollout.max_staleness, cycle, delay + score_seconds(scenario))


def _emptied(scenario: Scenario, demand: Demand, fleet: Fleet, train: float) -> Balance:
    """Return the steady state where engines run empty at each sync; between A = 0 and A = 1 in proportion, as in `gate`."""
    ahead, sync = steps_in_force(scenario), drawn(scenario.fleet.sync_seconds).mean
    state = drained(scenario, demand, train=train, ahead=ahead)
    cycle, group = state.cycle, _group_seconds(scenario, state.served.latency)
    if ahead < 1:
        members = max(1, round(groups_of(scenario) * scenario.rollout.group_size))
        in_turn = forms.in_turn_cycle(state.served.latency, members, train, sync) + score_seconds(scenario)
        cycle = in_turn + ahead * (cycle - in_turn)
    binding: Binding = "trainer" if cycle <= train * (1 + 1e-6) else "gate" if ahead < 1 else "sync"
    if state.starved and binding != "trainer":
        room = fleet.most_sequences * scenario.fleet.engines
        binding = "max_concurrent" if scenario.rollout.max_concurrent < room else "engines"
    return Balance(
        binding=binding,
        costs=binding,
        cycle=cycle,
        train=train,
        served=state.served,
        fed=train / state.fastest,
        group_seconds=group,
        delay=train + sync,
        residence=0.0,
        emptied=state,
    )


def gate(scenario: Scenario, served: Served, train: float, sync: float) -> float:
    """Return the shortest cycle that steps_ahead allows at this latency; between A = 0 and A = 1 in proportion."""
    rollout, ahead = scenario.rollout, steps_in_force(scenario)
    if rollout.enforce == "ship":
        return 0.0
    group = _group_seconds(scenario, served.latency)
    if ahead >= 1:
        return forms.gate_cycle(group, train, sync, ahead)
    members = round(groups_of(scenario) * rollout.group_size)
    in_turn = forms.in_turn_cycle(served.latency, max(1, members), train, sync) + score_seconds(scenario)
    return in_turn + ahead * (forms.gate_cycle(group, train, sync, 1.0) - in_turn)


def steps_in_force(scenario: Scenario) -> float:
    """Return A as it counts: never above S, in batches as large as they are; where admission does not ask for staleness ("ship"), S."""
    rollout = scenario.rollout
    if rollout.enforce == "ship":
        return float(rollout.max_staleness)
    ahead = min(steps_ahead(rollout), float(rollout.max_staleness))
    if not rollout.batch_tokens:
        return ahead
    return max(0.0, (ahead + 1.0) * min(1.0, max(1, smallest_batch(rollout)) / groups_of(scenario)) - 1.0)


def score_seconds(scenario: Scenario) -> float:
    """Return how long a scorer takes for a group on average."""
    return drawn(scenario.workload.score_seconds).mean


def _group_seconds(scenario: Scenario, latency: Curve) -> float:
    return latency.largest_of(scenario.rollout.group_size).mean + score_seconds(scenario)


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
