"""How fast engines are under load, in closed form: a curve of latencies for each number of sequences that decode at once.

The model is that of `FleetSection`: n sequences on an engine get tokens_per_second / (1 + n / half_speed_at) each; decoding stands still
during prefill, during a weight sync, and while what is in flight is prefilled again after it. Averages only: that sequences come and go,
wait for each other's prefill or are put back by a full KV cache is left to the simulation.

For n sequences an engine ends `rate` rollouts a second, where rate x tokens = n x speed x (1 - share of the time in which nothing decodes),
and that share is itself proportional to the rate: so rate has a closed form in n, and latency is n / rate by Little's law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.planning.curves import Curve, curve_of
from headway.sim.scenario import Scenario, drawn, tokens_of

_KNEE = 4.0  # x half_speed_at: an engine writes 80 % of what it ever could


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What one batch asks of the engines: `rollouts` to be run for it in all (failures, replaced groups and evaluations count)."""

    rollouts: float
    tokens: Curve
    prompt_tokens: float
    observed_tokens: float
    tool_seconds: float


@dataclass(frozen=True, kw_only=True)
class Served:
    """The fleet with `sequences` decoding on each engine: rollouts that end per second and engine, and one rollout's latency."""

    sequences: float
    rate: float
    in_flight: float
    latency: Curve


def demand_of(scenario: Scenario, groups: float) -> Demand:
    """Return what a batch of so many groups asks of the engines.

    An attempt that fails does so half-way on average, and is tried again if its failure allows that. With dynamic sampling, groups that
    score alike are replaced; those that a filter refuses always are.
    """
    workload, rollout = scenario.workload, scenario.rollout
    tried_again = sum(failing.share for failing in workload.failures if failing.retried)
    given_up = sum(failing.share for failing in workload.failures if not failing.retried)
    ended = 1.0 - tried_again - given_up
    attempts = (ended + (tried_again + given_up) / 2) / max(1e-9, 1.0 - tried_again)
    groups /= (1.0 - workload.zero_advantage_share if rollout.dynamic_sampling else 1.0) * (1.0 - workload.filtered_share)
    evaluation = scenario.eval.prompts * scenario.eval.n / scenario.eval.every if scenario.eval else 0.0
    return Demand(
        rollouts=groups * rollout.group_size * attempts + evaluation,
        tokens=curve_of(tokens_of(scenario)),
        prompt_tokens=drawn(workload.prompt_tokens).mean,
        observed_tokens=float(workload.observed_tokens * (workload.turns - 1)),
        tool_seconds=drawn(workload.tool_seconds).mean * (workload.turns - 1),
    )


class Fleet:
    """The engines of a scenario under the demand of one batch per cycle."""

    def __init__(self, scenario: Scenario, demand: Demand) -> None:
        fleet = scenario.fleet
        self._fleet = fleet
        self._budget = float(scenario.budget.sequences_per_engine or math.inf)
        self._demand = demand
        self._sync = drawn(fleet.sync_seconds).mean
        self._tokens = demand.tokens.mean
        self._held = demand.prompt_tokens + demand.observed_tokens / 2 + demand.tokens.half_square / self._tokens
        prefill = fleet.prefill_tokens_per_second
        self._prefill = (demand.prompt_tokens + demand.observed_tokens) / prefill if prefill else 0.0
        comes_again = fleet.weight_sync == "abort_resume" or (fleet.weight_sync == "in_flight" and fleet.recompute_kv)
        again = prefill and comes_again
        self._prefilled_again = self._held / prefill if again else 0.0  # seconds per sequence in flight and sync

    @property
    def most_sequences(self) -> float:
        """Sequences that an engine can use at once: max_sequences, what its KV cache holds, what it pays to prefill again at each sync."""
        fleet = self._fleet
        limits = [math.inf]
        if fleet.max_sequences:
            limits.append(float(fleet.max_sequences))
        if fleet.kv_tokens:
            limits.append(max(1.0, fleet.kv_tokens / self._held))
        if self._prefilled_again:
            per_sync = self._demand.rollouts / fleet.engines
            limits.append(max(1.0, math.sqrt(self._tokens / fleet.tokens_per_second * per_sync / self._prefilled_again)))
        return min(limits)

    @property
    def most_in_flight(self) -> float:
        """Rollouts in flight at an engine that is given all it should be: up to its limits, the knee of its speed and the budget."""
        fleet, most = self._fleet, self.most_sequences
        return min(self._around(min(most, _KNEE * fleet.half_speed_at) if fleet.half_speed_at else most), self._budget)

    @property
    def limit(self) -> tuple[float, str]:
        """How many rollouts in flight an engine can use, and what keeps it from using more, for people; (inf, "") for nothing."""
        usable = self._around(self.most_sequences)
        return (self._budget, f"budget.sequences_per_engine {self._budget:.0f}") if self._budget < usable else (usable, self.limit_words)

    def _around(self, sequences: float) -> float:
        """Return the rollouts in flight where an engine writes so many: some are with their environments meanwhile."""
        return self.with_sequences(sequences).in_flight if sequences < math.inf else math.inf

    @property
    def limit_words(self) -> str:
        """Return which of the limits on sequences it is, for people; "" for none."""
        fleet, most = self._fleet, self.most_sequences
        if most == math.inf:
            return ""
        if most == fleet.max_sequences:
            return f"fleet.max_sequences {fleet.max_sequences}"
        if fleet.kv_tokens and most == max(1.0, fleet.kv_tokens / self._held):
            return f"a KV cache that holds {most:.0f} rollouts"
        return f"prefilling again what is in flight at each sync, past {most:.0f} sequences"

    def with_sequences(self, n: float) -> Served:
        """Return the fleet with n sequences decoding on each engine, n above 0."""
        fleet = self._fleet
        speed = fleet.tokens_per_second / (1.0 + n / fleet.half_speed_at if fleet.half_speed_at else 1.0)
        standing = self._prefill + (self._sync + self._prefilled_again * n) * fleet.engines / self._demand.rollouts
        rate = n * speed / (self._tokens + n * speed * standing)
        beside = self._prefill + self._demand.tool_seconds
        per_token = n / (rate * self._tokens)
        latency = self._demand.tokens.moved(per_token, beside)
        return Served(sequences=n, rate=rate, in_flight=n + rate * beside, latency=latency)

    def filled(self, in_flight: float) -> Served:
        """Return the fleet with so many rollouts in flight on each engine, as far as it can use them."""
        low, high = 0.0, min(in_flight, self.most_sequences)
        if self.with_sequences(high).in_flight <= in_flight:
            return self.with_sequences(high)
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self.with_sequences(middle).in_flight <= in_flight else (low, middle)
        return self.with_sequences(max(low, 1e-9))

    def cycle(self, served: Served) -> float:
        """Return the seconds in which engines that are served so end one batch."""
        return self._demand.rollouts / (served.rate * self._fleet.engines)
