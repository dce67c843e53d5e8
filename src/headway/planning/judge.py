"""What to think of a config as it stands: the figures that it comes to, a verdict per knob, and what it would come to with those turned.

Each verdict compares two scenarios by closed forms, so that it says what a change is worth. Whether the aims are met is asked of the
simulation, where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from headway.planning.advice import Choice, choice_of, notes, what_binds
from headway.planning.balance import Binding
from headway.planning.confirm import Simulate, disagreements
from headway.planning.expected import Expected, expect
from headway.planning.search import engines_needed, held, least, meets, staffed, steps_ahead_wanted
from headway.planning.sensitivity import Turned, ahead_of, sensitivity, turned, with_engines
from headway.planning.simulate_text import percent
from headway.planning.words import NOTHING, changes, rate_words
from headway.settings import steps_ahead
from headway.settings.section import Section
from headway.sim.scenario import Scenario
from headway.sim.summary import Summary

_SPARE = 1.15  # how many times as fast as the trainer engines should be
_AS_GOOD = 0.98
_TOO_MANY = 1.25  # times what is needed, margin included
_LARGEST_BOUND = 1024
_NOT_STARVED: dict[Binding, str] = {
    "trainer": "the trainer binds",
    "gate": "the gate binds",
    "wait": "waiting binds",
    "sync": "weight syncs bind",
}


class Verdict(Section, frozen=True, kw_only=True):
    """A knob that should be turned: what it is, what it should be once those before are turned, and why, in words."""

    key: str
    now: float | str
    better: float | str
    words: str


class Judgement(Section, frozen=True, kw_only=True):
    """A config judged: `choice` is what it says, `better` what it should say (the same: nothing to change), with what is expected of each.

    `changes`: what `better` changes, in words. The other fields are as in `Plan`.
    """

    choice: Choice
    binding: str
    expected: Expected
    simulated: Summary | None
    disagreements: tuple[str, ...]
    aims_met: bool
    verdicts: tuple[Verdict, ...]
    better: Choice
    better_expected: Expected
    changes: str
    notes: tuple[str, ...]
    sensitivity: tuple[Turned, ...]


def judge(scenario: Scenario, simulate: Simulate | None) -> Judgement:
    """Judge the knobs of a scenario as they stand. `simulate` None: by closed forms only. Raises ConfigError for a world without a mean."""
    expected = expect(scenario)
    summary = simulate(scenario) if simulate is not None else None
    figures = summary if summary is not None else expected
    choice, better, verdicts = choice_of(scenario), scenario, []
    for look in (_on_stale, _starved, _engines, _ahead, _idle, _bound):
        for verdict, turned_so in look(better):
            verdicts.append(msgspec.structs.replace(verdict, now=getattr(choice_of(better), verdict.key)))
            better = turned_so
    after = expect(better)
    return Judgement(
        choice=choice,
        binding=what_binds(scenario, expected),
        expected=expected,
        simulated=summary,
        disagreements=disagreements(expected, summary) if summary is not None else (),
        aims_met=meets(scenario, figures.masked_share, figures.head_coverage),
        verdicts=tuple(verdicts),
        better=choice_of(better),
        better_expected=after,
        changes=changes(expected, after),
        notes=tuple(notes(scenario, expected, simulated=summary is not None or simulate is None)),
        sensitivity=sensitivity(scenario, expected),
    )


def _on_stale(scenario: Scenario) -> Iterator[tuple[Verdict, Scenario]]:
    """Whether wait or drop cost more than masking would; that train has no bound."""
    now, mode = expect(scenario), scenario.rollout.on_stale
    masks = turned(scenario, on_stale="mask")
    other = expect(masks)
    if mode == "wait" and other.batches_per_hour > 1.05 * now.batches_per_hour:
        words = f"waiting costs {percent(1 - now.batches_per_hour / other.batches_per_hour)} of the batches"
    elif mode == "drop" and now.waste > other.waste + 0.01:
        words = f"dropping wastes {percent(now.waste)} of the tokens, masking {percent(other.waste)}"
    elif mode == "train":
        words = f"without a bound tokens of up to about {now.max_staleness} versions are trained on: the loss must correct for that"
    else:
        return
    yield Verdict(key="on_stale", now=mode, better="mask", words=words), masks


def _starved(scenario: Scenario) -> Iterator[tuple[Verdict, Scenario]]:
    """Whether max_concurrent starves the trainer."""
    expected, flying = expect(scenario), scenario.rollout.max_concurrent
    if expected.binding == "max_concurrent":
        full = staffed(scenario, scenario.fleet.engines)
        other = turned(full, max_concurrent=min(full.rollout.max_concurrent, expect(full).needed))
        more = other.rollout.max_concurrent
        if more > flying:
            words = f"{flying} rollouts in flight starve the trainer: {changes(expected, expect(other))}"
            yield Verdict(key="max_concurrent", now=flying, better=more, words=words), other


def _idle(scenario: Scenario) -> Iterator[tuple[Verdict, Scenario]]:
    """Whether max_concurrent is more than ever flies."""
    expected, flying = expect(scenario), scenario.rollout.max_concurrent
    if expected.binding in _NOT_STARVED and flying > _TOO_MANY * expected.needed:
        other = turned(scenario, max_concurrent=expected.needed)
        words = f"{flying} buys nothing over {expected.needed}: {_NOT_STARVED[expected.binding]}"
        yield Verdict(key="max_concurrent", now=flying, better=expected.needed, words=words), other


def _engines(scenario: Scenario) -> Iterator[tuple[Verdict, Scenario]]:
    """Whether engines are too few for the trainer, or more than it takes."""
    expected, engines = expect(scenario), scenario.fleet.engines
    if not held(scenario) < math.inf:
        return
    if expected.binding == "engines":
        needed, most = engines_needed(scenario, 1.0), scenario.budget.engines or engines
        if needed is not None and engines < needed:
            to = max(engines, min(needed, most))
            other = staffed(scenario, to)
            also = ", with more steps_ahead" if expect(staffed(scenario, needed)).binding == "gate" else ""
            words = f"{needed} would keep the trainer busy{also}{f'; budget.engines is {most}' if needed > most else ''}"
            yield Verdict(key="engines", now=engines, better=needed, words=words), other if to > engines else scenario
    elif expected.binding == "trainer" and engines > 1 and expected.engines_feed > 1:
        fewest = least(lambda count: _feeds(with_engines(scenario, count), expected), 1, engines)
        if fewest is not None and fewest < engines * 0.8:
            other = with_engines(scenario, fewest)
            words = f"{fewest} would feed the trainer as well: {changes(expected, expect(other), always=('batches/hour',))}"
            yield Verdict(key="engines", now=engines, better=fewest, words=words), scenario


def _feeds(scenario: Scenario, before: Expected) -> bool:
    """Whether these engines feed the trainer as well as those before, with something to spare."""
    now = expect(scenario)
    return now.engines_feed >= _SPARE and now.batches_per_hour >= _AS_GOOD * before.batches_per_hour


def _ahead(scenario: Scenario) -> Iterator[tuple[Verdict, Scenario]]:
    """Whether steps_ahead holds rollouts back, or makes tokens old for nothing."""
    rollout = scenario.rollout
    if rollout.enforce == "ship" or not rollout.max_staleness or rollout.steps_ahead == "auto":
        return
    expected, ahead, bound = expect(scenario), steps_ahead(rollout), rollout.max_staleness
    free = expect(turned(scenario, steps_ahead=float(bound)))
    wanted = steps_ahead_wanted(turned(scenario, max_staleness=_LARGEST_BOUND), free)
    if expected.binding in {"gate", "sync"}:
        within = min(wanted, float(bound))
        if wanted > bound and free.batches_per_hour < _AS_GOOD * expect(_raised(scenario, wanted)).batches_per_hour:
            within = wanted
        other = _raised(scenario, within)
        if within > ahead and expect(other).batches_per_hour > 1.02 * expected.batches_per_hour:
            words = f"{ahead:g} holds rollouts back: {changes(expected, expect(other), always=('batches/hour',))}"
            if (needed := other.rollout.max_staleness) > bound:
                allows = f"steps_ahead {within:g} needs it"
                yield Verdict(key="max_staleness", now=bound, better=needed, words=allows), turned(other, steps_ahead=ahead)
            yield Verdict(key="steps_ahead", now=ahead, better=within, words=words), other
    elif ahead > wanted + 0.5:
        other = turned(scenario, steps_ahead=wanted)
        words = f"{ahead:g} makes tokens older for nothing: {changes(expected, expect(other), always=('batches/hour',))}"
        yield Verdict(key="steps_ahead", now=ahead, better=wanted, words=words), other


def _raised(scenario: Scenario, ahead: float) -> Scenario:
    """Return the scenario with this steps_ahead, and a max_staleness that allows it."""
    return turned(scenario, max_staleness=max(scenario.rollout.max_staleness, math.ceil(ahead)), steps_ahead=ahead)


def _bound(scenario: Scenario) -> Iterator[tuple[Verdict, Scenario]]:
    """Whether max_staleness misses the aims, or is far above the smallest that meets them."""
    rollout, budget = scenario.rollout, scenario.budget
    if rollout.on_stale != "mask":
        return
    expected, bound, ahead = expect(scenario), rollout.max_staleness, ahead_of(rollout)
    first = 1 if ahead == "auto" else max(1, math.ceil(ahead))

    def fits(at: int) -> bool:
        then = expect(turned(scenario, max_staleness=at, steps_ahead=ahead))
        return meets(scenario, then.masked_share, then.head_coverage)

    enough = least(fits, first, _LARGEST_BOUND)
    if meets(scenario, expected.masked_share, expected.head_coverage):
        if enough is not None and bound >= 2 * enough:
            other = turned(scenario, max_staleness=enough, steps_ahead=ahead)
            worth = changes(expected, expect(other))
            if worth == NOTHING:
                return
            words = f"{enough} meets the aims, with younger tokens: {worth}"
            yield Verdict(key="max_staleness", now=bound, better=enough, words=words), other
        return
    missed = f"at {bound}, {percent(expected.masked_share)} of the tokens are masked (aim: {percent(budget.masked_share)} at most)"
    if expected.masked_share <= budget.masked_share:
        missed = f"at {bound}, head coverage is {percent(expected.head_coverage)} (aim: {percent(budget.head_coverage)} at least)"
    if enough is None:
        words = f"{missed}, and no bound would be enough: larger batches, shorter rollouts"
        yield Verdict(key="max_staleness", now=bound, better=bound, words=words), scenario
        return
    other = turned(scenario, max_staleness=enough, steps_ahead=ahead)
    words = f"{missed}: {changes(expected, expect(other), always=('mean',))}"
    if enough > budget.max_staleness:
        words += f" ({rate_words(enough, bound)} groups_per_batch does the same)"
    yield Verdict(key="max_staleness", now=bound, better=enough, words=words), other
