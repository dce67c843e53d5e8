"""What to set: a plan that meets the budget's aims, chosen by closed forms (`search`) and confirmed by simulation.

Where the simulation misses the aims the next max_staleness is tried, then the next batch size; where the gate starves its trainer, the next
steps_ahead: within `MOST_SIMULATIONS`. The simulation is believed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from headway.errors import ConfigError
from headway.planning import forms
from headway.planning.balance import balance, fresh, groups_of, paced
from headway.planning.confirm import Simulate, disagreements
from headway.planning.drains import drains
from headway.planning.expected import Expected, expect
from headway.planning.search import Found, bounded, candidates, engines_needed, held, limit_words, meets, what_it_takes
from headway.planning.sensitivity import Turned, ahead_of, sensitivity, turned
from headway.planning.shipping import largest_queue
from headway.planning.simulate_text import percent
from headway.planning.words import binding_words, changes
from headway.settings import steps_ahead
from headway.settings.section import Section
from headway.sim.scenario import Scenario, tokens_of
from headway.sim.summary import Summary
from headway.types import OnStale

MOST_SIMULATIONS = 6
_BUSY = 0.95
_LITTLE = 0.02  # of the time
_STARVED = 1.05  # times as many batches expected as simulated: more steps_ahead would help


class Choice(Section, frozen=True, kw_only=True):
    """The knobs of a plan, by their names in a config; `engines` is how many of them. `batch_tokens` above 0: batches are sized by it."""

    max_staleness: int
    steps_ahead: float | Literal["auto"]
    groups_per_batch: int
    batch_tokens: int
    group_size: int
    max_concurrent: int
    on_stale: OnStale
    engines: int


class Plan(Section, frozen=True, kw_only=True):
    """What to set, what is expected of it, and what each knob is worth.

    `expected` by closed forms, `simulated` by a simulation (None: not simulated), which counts where there is one. `disagreements`: where
    the two are further apart than usual. `tried`: settings that a simulation found to miss the aims, or to be slower. `notes`: what else
    to know.
    """

    choice: Choice
    binding: str
    expected: Expected
    simulated: Summary | None
    disagreements: tuple[str, ...]
    tried: tuple[str, ...]
    notes: tuple[str, ...]
    sensitivity: tuple[Turned, ...]


def choice_of(scenario: Scenario) -> Choice:
    """Return the knobs of a scenario as they stand."""
    rollout = scenario.rollout
    return Choice(
        max_staleness=rollout.max_staleness,
        steps_ahead=ahead_of(rollout),
        groups_per_batch=rollout.groups_per_batch,
        batch_tokens=rollout.batch_tokens,
        group_size=rollout.group_size,
        max_concurrent=rollout.max_concurrent,
        on_stale=rollout.on_stale,
        engines=scenario.fleet.engines,
    )


def recommend(scenario: Scenario, simulate: Simulate | None) -> Plan:
    """Return a plan that meets the budget's aims. `simulate` None: by closed forms only.

    Raises ConfigError, in one line, when none does: which aim is missed, and what it would take.
    """
    found = list(candidates(scenario))
    if not found:
        raise ConfigError(what_it_takes(scenario))
    chosen, summary, tried = _confirmed(scenario, found, simulate)
    return Plan(
        choice=choice_of(chosen.scenario),
        binding=_what_binds(chosen),
        expected=chosen.expected,
        simulated=summary,
        disagreements=disagreements(chosen.expected, summary) if summary else (),
        tried=tried,
        notes=tuple(notes(chosen.scenario, chosen.expected, simulated=summary is not None or simulate is None)),
        sensitivity=sensitivity(chosen.scenario, chosen.expected),
    )


def _what_binds(chosen: Found) -> str:
    rollout, engines = chosen.scenario.rollout, chosen.scenario.fleet.engines
    full = held(chosen.scenario) * engines
    if chosen.expected.binding == "max_concurrent" and rollout.max_concurrent < 0.9 * full < math.inf:
        waits = percent(1 - chosen.expected.trainer_busy)
        return (
            f"engines bind: the trainer waits {waits} of the time; {rollout.max_concurrent} rollouts in flight of the {full:.0f} that "
            f"{'1 engine holds' if engines == 1 else f'{engines} engines hold'}, since more would be slower and too old for the aims"
        )
    return what_binds(chosen.scenario, chosen.expected)


def what_binds(scenario: Scenario, expected: Expected) -> str:
    """Return the sentence about what binds."""
    enough = engines_needed(scenario) if expected.binding == "engines" else None
    return binding_words(expected, scenario.rollout, engines=scenario.fleet.engines, enough=enough, limit=limit_words(scenario))


def notes(scenario: Scenario, expected: Expected, *, simulated: bool = True) -> Iterator[str]:
    """Yield what else is to be known of a plan."""
    rollout, fleet = scenario.rollout, scenario.fleet
    if not simulated:
        yield "not simulated: so much takes too long here; `headway simulate` plays it all"
    if drains(scenario):
        other = expect(msgspec.structs.replace(scenario, fleet=msgspec.structs.replace(fleet, weight_sync="in_flight")))
        worth = changes(expected, other, always=("batches/hour",))
        yield f'weight_sync = "wait": engines run empty before each sync; with "in_flight": {worth}'
    elif fleet.weight_sync == "wait":
        yield 'weight_sync = "wait": engines run empty at each sync, which closed forms do not know here: go by the simulation'
    yield from _queue(scenario, expected)
    yield from _held_up(scenario, expected)
    longest = tokens_of(scenario).largest * expected.rollout_seconds / tokens_of(scenario).mean
    zero = forms.zero_waste_staleness(longest, expected.cycle_seconds, balance(paced(scenario)).delay)
    if zero is not None and zero <= rollout.max_staleness and rollout.on_stale == "mask":
        yield f'at max_staleness {zero} even the longest rollout is in time: nothing is masked, and on_stale = "wait" would never wait'
    if 0 < rollout.timeout_seconds < longest:
        late = tokens_of(scenario).above(rollout.timeout_seconds * tokens_of(scenario).mean / expected.rollout_seconds)
        if late > 0.001:
            yield f"{percent(late)} of the rollouts take longer than rollout.timeout_seconds ({rollout.timeout_seconds:g})"
    if not held(scenario) < math.inf:
        yield "nothing in [fleet] or [budget] limits what an engine takes: the number of engines cannot be judged"


def _held_up(scenario: Scenario, expected: Expected) -> Iterator[str]:
    """Yield how long evaluations may hold syncs up, where that is not little."""
    held_up = scenario.eval
    if held_up is not None and held_up.hold_seconds > _LITTLE * held_up.every * expected.cycle_seconds:
        yield (
            f"every {held_up.every} versions an evaluation may hold a sync up for {held_up.hold_seconds:g} s (eval.hold_seconds), "
            "which closed forms do not know: go by the simulation"
        )


def _queue(scenario: Scenario, expected: Expected) -> Iterator[str]:
    """Yield what becomes of what waits before a trainer that is slower than the engines (enforce = "ship")."""
    state = balance(paced(scenario))
    if state.queue is None or not state.queue.spoils:
        return
    ended, age = 1 / state.queue.trained_share, fresh(scenario, state.cycle, state.delay)
    enough = largest_queue(state.served.latency, scenario.rollout.group_size, groups=groups_of(scenario), cycle=state.cycle, fresh=age)
    cure = (
        f"max_ready_groups = {enough} keeps it young" if enough else 'max_concurrent lower, max_staleness higher, or enforce = "admission"'
    )
    yield (
        f'enforce = "ship": engines end {ended:.1f} x as many groups as are trained, and what waits grows too old: about '
        f"{percent(expected.waste)} of the tokens are written for nothing (by simulation it may be less): {cure}"
    )


def _confirmed(scenario: Scenario, found: list[Found], simulate: Simulate | None) -> tuple[Found, Summary | None, tuple[str, ...]]:
    """Return the first candidate that the simulation finds to meet the aims too, with what it found of those before.

    Raises ConfigError when none does within the budget and the number of simulations.
    """
    if simulate is None:
        return found[0], None, ()
    tried: list[tuple[Found, Summary]] = []
    good: tuple[Found, Summary] | None = None
    for candidate in found:
        here: Found | None = candidate
        while here is not None and len(tried) < MOST_SIMULATIONS:
            summary = simulate(here.scenario)
            if summary is None:
                return here, None, _given_up(tried)
            tried.append((here, summary))
            if meets(scenario, summary.masked_share, summary.head_coverage):
                good = here, summary
            here = _next(here, summary)
        if good is not None:
            return *good, _given_up(tried, but=good[0])
    raise ConfigError(
        f"budget: by closed forms the aims can be met, by simulation they are not ({_given_up(tried)[-1]}): "
        "raise budget.max_staleness, or add a larger size to budget.groups_per_batch"
    )


def _given_up(tried: list[tuple[Found, Summary]], *, but: Found | None = None) -> tuple[str, ...]:
    """Return what simulations found, a line each, of all that was not chosen."""
    return tuple(_came_to(one, summary) for one, summary in tried if one is not but)


def _next(here: Found, summary: Summary) -> Found | None:
    """Return what to try after a simulation: None where it is as it should be, and where there is nothing left to try."""
    rollout, budget = here.scenario.rollout, here.scenario.budget
    if not meets(here.scenario, summary.masked_share, summary.head_coverage):
        bound = min(budget.max_staleness, rollout.max_staleness + max(1, rollout.max_staleness // 5))
        return bounded(here.scenario, bound) if bound > rollout.max_staleness else None
    ahead = min(steps_ahead(rollout) + 0.5, float(rollout.max_staleness))
    slow = summary.batches_per_hour * _STARVED < here.expected.batches_per_hour and summary.trainer_busy < _BUSY
    if slow and summary.gate_closed.get("staleness", 0.0) > 1 - _BUSY and ahead > steps_ahead(rollout):
        scenario = turned(here.scenario, steps_ahead=ahead)
        return Found(scenario, here.expected)
    return None


def _came_to(here: Found, summary: Summary) -> str:
    rollout = here.scenario.rollout
    return (
        f"groups_per_batch {rollout.groups_per_batch}, max_staleness {rollout.max_staleness}, steps_ahead {steps_ahead(rollout):g}: masked "
        f"{percent(summary.masked_share)}, head coverage {percent(summary.head_coverage)}, trainer busy {percent(summary.trainer_busy)}"
    )
