"""Holds what closed forms expect against a simulation of the same scenario, and says where the two disagree.

The cohort stepper simulates where it can, the virtual loop elsewhere; of that no more rollouts than a plan can wait for. Where they
disagree the simulation is believed: it plays the rules themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from headway.planning.balance import groups_of
from headway.planning.expected import Expected, expect
from headway.planning.fleet import demand_of
from headway.planning.quiet import quietly
from headway.planning.words import rate_text
from headway.settings import steps_ahead
from headway.sim.scenario import Scenario, tokens_of
from headway.sim.summary import Summary

Simulate: TypeAlias = Callable[[Scenario], Summary | None]
"""Return how a scenario is simulated to go; None: it is too large to be waited for."""

ROLLOUTS, MOST_ROLLOUTS = 20_000, 100_000  # that the virtual loop plays for one confirmation, as a rule and at most
MOST_BY_COHORTS = 10_000_000  # rollouts that the stepper plays for one confirmation
MOST_ENGINE_SECONDS = 1e7  # in one confirmation: every engine is asked every few seconds how it is
_SURELY_NONE = 0.05  # rollouts in a whole run
_FEWEST_BATCHES = 20  # after the warm-up

RATE_TOLERANCE = 0.10  # of batches/hour
MEAN_TOLERANCE = 0.5  # versions
MASKED_TOLERANCE = (0.015, 0.3)  # points, and as a share of the simulated figure: the larger counts
COVERAGE_TOLERANCE = 0.03  # points


def simulated(scenario: Scenario, *, watch: Callable[[int], Callable[[int], None]] | None = None) -> Summary | None:
    """Simulate a scenario for a plan: with its seed and its length, shorter where that would take long, longer where it is about to fill.

    `watch`: is told of how many batches a simulation will be, and returns what is told how many there are by now.
    """
    from headway.sim.cohort_scope import NotForCohorts
    from headway.sim.cohorts import step

    if scenario.run.steps * groups_of(scenario) * scenario.rollout.group_size > MOST_BY_COHORTS:
        return None
    fewest = _FEWEST_BATCHES + _filling(scenario)
    try:
        return step(settled(_untimed(scenario), max(fewest, scenario.run.steps)))
    except NotForCohorts:
        pass
    batch = demand_of(scenario, groups_of(scenario)).rollouts
    steps = max(fewest, min(scenario.run.steps, round(ROLLOUTS / batch)))
    if steps * batch > MOST_ROLLOUTS or steps * expect(scenario).cycle_seconds * scenario.fleet.engines > MOST_ENGINE_SECONDS:
        return None
    from headway.sim.figures import summarise
    from headway.sim.play import play

    with quietly():
        return summarise(play(settled(scenario, steps), progress=None if watch is None else watch(steps)))


def settled(scenario: Scenario, steps: int) -> Scenario:
    """Return the scenario with so many batches, of which those count that come once the pipeline is full."""
    warm_up = scenario.run.warm_up
    enough = max(steps // 10, _filling(scenario)) if warm_up is None else warm_up
    run = msgspec.structs.replace(scenario.run, steps=steps, warm_up=min(enough, steps - 1))
    return msgspec.structs.replace(scenario, run=run)


def _untimed(scenario: Scenario) -> Scenario:
    """Return the scenario without a timeout that no rollout of the run is expected to reach, which the stepper does not know."""
    rollout = scenario.rollout
    late = tokens_of(scenario).above(rollout.timeout_seconds * scenario.fleet.tokens_per_second)
    if late * scenario.run.steps * rollout.groups_per_batch * rollout.group_size > _SURELY_NONE:
        return scenario
    return msgspec.structs.replace(scenario, rollout=msgspec.structs.replace(rollout, timeout_seconds=0.0))


def disagreements(expected: Expected, summary: Summary) -> tuple[str, ...]:
    """Say where closed forms and simulation are further apart than is usual, one line each."""
    lines = []
    rate = expected.batches_per_hour
    if abs(rate - summary.batches_per_hour) > RATE_TOLERANCE * summary.batches_per_hour:
        lines.append(f"batches/hour: {rate_text(rate)} by formula, {rate_text(summary.batches_per_hour)} simulated")
    mean = summary.staleness.mean
    if abs(expected.mean_staleness - mean) > MEAN_TOLERANCE:
        lines.append(f"mean staleness: {expected.mean_staleness:.2f} by formula, {mean:.2f} simulated")
    masked = summary.masked_share
    if abs(expected.masked_share - masked) > max(MASKED_TOLERANCE[0], MASKED_TOLERANCE[1] * masked):
        lines.append(f"masked tokens: {expected.masked_share:.1%} by formula, {masked:.1%} simulated")
    if abs(expected.head_coverage - summary.head_coverage) > COVERAGE_TOLERANCE:
        lines.append(f"head coverage: {expected.head_coverage:.1%} by formula, {summary.head_coverage:.1%} simulated")
    return tuple(lines)


def _filling(scenario: Scenario) -> int:
    """Return after how many batches the first ones no longer show."""
    return 2 * math.ceil(min(steps_ahead(scenario.rollout), scenario.rollout.max_staleness)) + 4
