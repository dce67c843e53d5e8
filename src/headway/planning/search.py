"""The search for knobs under a budget, by closed forms.

For each batch size:

    engines          the fewest that could feed the trainer 1.15 x; all of the budget where none can
    max_concurrent   Little's number with a margin, or what these engines hold; less where that makes rollouts too slow for the aims
    max_staleness    the smallest that meets the aims (masked tokens, head coverage) and costs no more than 3 % of the batches
    steps_ahead      E[L] / gamma + 1

Sizes come in this order: the smallest that trains 95 % of the tokens per second of the best, larger ones, and then those that train less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headway.planning.balance import groups_of, in_batches_admitted
from headway.planning.drains import drains
from headway.planning.expected import Expected, expect
from headway.planning.fleet import Fleet, demand_of
from headway.planning.magnitudes import MOST_ROLLOUTS, MOST_STALENESS
from headway.planning.sensitivity import turned, with_engines
from headway.planning.simulate_text import percent
from headway.rules.pacing import steps_needed
from headway.sim.scenario import Scenario

_SPARE = 1.15  # how many times as fast as the trainer the engines should be
_COST = 1.03  # how much longer a cycle may be than without any bound
_NEARLY = 0.95  # of the best rate: a smaller batch is worth the rest
_FILLED = (1.0, 0.7, 0.5)  # of what engines hold: tried in turn
_ABOUT = 1.1  # whole groups are in flight: a limit is rarely met exactly
_NO_LIMIT = 1 << 20
_AS_FAST = 1.02  # times the shortest cycle
_DOUBLINGS = 6  # how much more of a knob is looked at where nothing meets the aims
_MOST_AHEAD = 32  # that are looked at where engines run empty at each sync


@dataclass(frozen=True)
class Found:
    """A scenario whose knobs are chosen, and what is expected of it."""

    scenario: Scenario
    expected: Expected


def meets(scenario: Scenario, masked_share: float, head_coverage: float) -> bool:
    """Whether figures meet the budget's aims."""
    return masked_share <= scenario.budget.masked_share and head_coverage >= scenario.budget.head_coverage


def candidates(scenario: Scenario) -> Iterator[Found]:
    """Yield the batch sizes that meet the aims, each with its knobs."""
    found = [one for size in sizes_of(scenario) if (one := sized(scenario, size)) is not None]
    best = max((one.expected.trained_tokens_per_second for one in found), default=0.0)
    slow = [one for one in found if one.expected.trained_tokens_per_second < _NEARLY * best]
    yield from [one for one in found if one not in slow]
    yield from reversed(slow)


def sizes_of(scenario: Scenario) -> list[int]:
    """Return the batch sizes to choose from, smallest first. Batches that are sized by tokens stay as they are."""
    if scenario.rollout.batch_tokens:
        return [scenario.rollout.groups_per_batch]
    return sorted(set(scenario.budget.groups_per_batch)) or [scenario.rollout.groups_per_batch]


def sized(scenario: Scenario, groups: int, most: int | None = None) -> Found | None:
    """Return the knobs for a batch size, None where the aims cannot be met with max_staleness up to `most` (unset: the budget's).

    Where full engines make rollouts too slow for the aims, fewer are kept in flight: less is written, and it is younger.
    """
    most = scenario.budget.max_staleness if most is None else most
    base = _manned(scenario, groups, most)
    for share in _FILLED:
        size = base.rollout.group_size
        fewer = turned(base, max_concurrent=max(1, int(share * base.rollout.max_concurrent) // size) * size)
        if (found := _within(fewer, most)) is not None:
            return found
        if expect(base).binding not in {"engines", "max_concurrent"}:
            return None  # it is not the engines that make rollouts late
    return None


def _manned(scenario: Scenario, groups: int, most: int) -> Scenario:
    """Return the scenario with this batch size, its engines and what is in flight at them; max_staleness and steps_ahead are `most`."""
    base = turned(scenario, groups_per_batch=groups, on_stale="mask", enforce="admission", max_staleness=most, steps_ahead=float(most))
    available = scenario.budget.engines or scenario.fleet.engines

    def enough(count: int) -> bool:
        return expect(staffed(base, count)).engines_feed >= _SPARE

    engines = least(enough, 1, available) if held(base) < math.inf else scenario.fleet.engines
    base = staffed(base, engines or available)
    return turned(base, max_concurrent=min(base.rollout.max_concurrent, expect(base).needed))


def _within(base: Scenario, most: int) -> Found | None:
    """Return the smallest max_staleness that meets the aims and costs next to nothing; where all that meet them cost, the largest."""
    reachable = expect(base).cycle_seconds * _COST

    def fits(bound: int, *, slower: bool = False) -> bool:
        expected = bounded(base, bound).expected
        fast = slower or expected.cycle_seconds <= reachable
        return fast and meets(base, expected.masked_share, expected.head_coverage)

    bound = least(fits, 1, most)
    if bound is None and fits(most, slower=True):
        bound = most
    return None if bound is None else bounded(base, bound)


def bounded(base: Scenario, bound: int) -> Found:
    """Return the scenario with this max_staleness, and the steps_ahead that goes with it."""
    free = turned(base, max_staleness=bound, steps_ahead=float(bound))
    expected = expect(free)
    scenario = turned(free, steps_ahead=steps_ahead_wanted(free, expected))
    return Found(scenario, expect(scenario))


def steps_ahead_wanted(scenario: Scenario, expected: Expected) -> float:
    """Return the steps_ahead, at most max_staleness, at which rollouts are as fast as with any more; `expected`: with as many as may be.

    A = E[L] / gamma + 1, or, where engines run empty at each sync, what that takes by its own recursion.
    """
    bound = scenario.rollout.max_staleness
    if not drains(scenario) or bound < 1:
        needed = in_batches_admitted(scenario, steps_needed(expected.group_seconds, expected.cycle_seconds))
        return min(math.ceil(2 * needed - 1e-9) / 2, float(bound))
    most = min(bound, _MOST_AHEAD)
    fastest = expect(turned(scenario, steps_ahead=float(most))).cycle_seconds

    def enough(halves: int) -> bool:
        return expect(turned(scenario, steps_ahead=halves / 2)).cycle_seconds <= _AS_FAST * fastest

    return (least(enough, 2, 2 * most) or 2 * most) / 2


def held(scenario: Scenario) -> float:
    """Return how many rollouts are in flight at an engine at most: by the budget, by its own limits, by the knee of its speed."""
    return Fleet(scenario, demand_of(scenario, groups_of(scenario))).most_in_flight


def staffed(scenario: Scenario, engines: int) -> Scenario:
    """Return the scenario with so many engines, and as much in flight as they take."""
    scenario = with_engines(scenario, engines)
    size = scenario.rollout.group_size
    most = min(held(scenario) * engines, float(_NO_LIMIT))
    return turned(scenario, max_concurrent=max(1, int(most) // size) * size)


def engines_needed(scenario: Scenario, spare: float = 1.0) -> int | None:
    """Return the fewest engines that could feed the trainer `spare` times over, each with what it holds; None: no number would."""

    def enough(count: int) -> bool:
        return expect(staffed(scenario, count)).engines_feed >= spare

    return least(enough, 1, 64 * scenario.fleet.engines)


def limit_words(scenario: Scenario) -> str:
    """Return what keeps an engine of this fleet from using more sequences, for people; "" for nothing."""
    most, words = Fleet(scenario, demand_of(scenario, groups_of(scenario))).limit
    return words if most <= _ABOUT * scenario.rollout.max_concurrent / scenario.fleet.engines else ""


def least(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the least whole number from low to high of which it holds, as it does of all above; None: of none."""
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high


def what_it_takes(scenario: Scenario) -> str:
    """Say which aim no plan within the budget meets, and what would."""
    budget, most = scenario.budget, scenario.budget.max_staleness
    sizes = sizes_of(scenario)
    nearest = bounded(_manned(scenario, sizes[-1], most), most).expected
    missed = []
    if nearest.masked_share > budget.masked_share:
        missed.append(
            f"{percent(nearest.masked_share)} of the tokens would be masked (budget.masked_share is {percent(budget.masked_share)})"
        )
    if nearest.head_coverage < budget.head_coverage:
        missed.append(f"head coverage would be {percent(nearest.head_coverage)} (budget.head_coverage is {percent(budget.head_coverage)})")
    takes = []
    larger = _doublings(most, MOST_STALENESS)
    index = least(lambda index: sized(scenario, sizes[-1], larger[index]) is not None, 0, len(larger) - 1) if larger else None
    if index is not None and (exact := sized(scenario, sizes[-1], larger[index])) is not None:
        takes.append(f"max_staleness {exact.scenario.rollout.max_staleness}")
    largest = 0 if scenario.rollout.batch_tokens else MOST_ROLLOUTS // scenario.rollout.group_size
    batches = _doublings(sizes[-1], largest)
    index = least(lambda index: sized(scenario, batches[index]) is not None, 0, len(batches) - 1) if batches else None
    if index is not None:
        takes.append(f"groups_per_batch {batches[index]}")
    ways = f"it takes {' or '.join(takes)}, " if takes else "it takes "
    return (
        f"budget: no plan meets the aims: with max_staleness {most} and groups_per_batch {sizes[-1]}, {' and '.join(missed)}: {ways}"
        f'{"or " if takes else ""}shorter rollouts (a token limit), or on_stale = "train" with a loss that corrects'
    )


def _doublings(start: int, most: int) -> list[int]:
    return [value for power in range(1, _DOUBLINGS + 1) if (value := start * 2**power) <= most]
