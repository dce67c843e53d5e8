"""What each knob is worth: the same scenario with one of them turned, by closed forms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from headway.planning.expected import Expected, expect
from headway.planning.words import changes
from headway.settings import RolloutSection, steps_ahead
from headway.settings.section import Section
from headway.sim.scenario import Scenario


class Turned(Section, frozen=True, kw_only=True):
    """One knob turned: from what to what, what is expected then, and what that changes, in words."""

    key: str
    before: float | str
    after: float | str
    words: str
    expected: Expected


def turned(scenario: Scenario, **rollout: Any) -> Scenario:
    """Return the scenario with other [rollout] keys; steps_ahead stays at most max_staleness."""
    section = msgspec.structs.replace(scenario.rollout, **rollout)
    if not isinstance(section.steps_ahead, str) and section.steps_ahead is not None:
        section = msgspec.structs.replace(section, steps_ahead=min(section.steps_ahead, float(section.max_staleness)))
    return msgspec.structs.replace(scenario, rollout=section)


def ahead_of(rollout: RolloutSection) -> float | Literal["auto"]:
    """Return steps_ahead as it stands, with its default written out."""
    return "auto" if rollout.steps_ahead == "auto" else steps_ahead(rollout)


def with_engines(scenario: Scenario, engines: int) -> Scenario:
    """Return the scenario with so many engines."""
    return msgspec.structs.replace(scenario, fleet=msgspec.structs.replace(scenario.fleet, engines=engines))


def sensitivity(scenario: Scenario, expected: Expected) -> tuple[Turned, ...]:
    """Return the table: each knob turned down and up, the others as they are (but that max_concurrent goes along with groups_per_batch)."""
    rows = []
    for key, before, after, other in _neighbours(scenario):
        then = expect(other)
        always = ("mean",) if key in {"max_staleness", "on_stale"} else ("batches/hour",)
        words = changes(expected, then, always=always, tokens=key == "groups_per_batch")
        rows.append(Turned(key=key, before=before, after=after, words=words, expected=then))
    return tuple(rows)


def _neighbours(scenario: Scenario) -> Iterator[tuple[str, float | str, float | str, Scenario]]:
    rollout = scenario.rollout
    bound, ahead, size = rollout.max_staleness, steps_ahead(rollout), rollout.group_size
    flying = rollout.max_concurrent
    for other in _distinct(bound, bound // 2, bound * 2 or 1, least=0):
        yield "max_staleness", bound, other, turned(scenario, max_staleness=other, steps_ahead=ahead_of(rollout))
    if rollout.enforce == "admission" and rollout.steps_ahead != "auto":
        for ahead_then in _distinct(ahead, max(0.0, ahead - 1), min(ahead + 1, float(bound)), float(bound), least=0):
            yield "steps_ahead", ahead, ahead_then, turned(scenario, steps_ahead=ahead_then)
    if not rollout.batch_tokens:
        batch = rollout.groups_per_batch
        for other in _distinct(batch, batch // 2, batch * 2):
            along = max(1, round(flying * other / batch / size)) * size
            yield "groups_per_batch", batch, other, turned(scenario, groups_per_batch=other, max_concurrent=along)
    for other in _distinct(flying, max(1, flying // 2 // size) * size, flying * 2):
        yield "max_concurrent", flying, other, turned(scenario, max_concurrent=other)
    engines = scenario.fleet.engines
    for other in _distinct(engines, engines // 2, engines * 2):
        yield "engines", engines, other, with_engines(scenario, other)
    for mode in ("mask", "wait", "drop", "train"):
        if mode != rollout.on_stale and not (mode == "wait" and rollout.enforce == "ship"):
            yield "on_stale", rollout.on_stale, mode, turned(scenario, on_stale=mode)


def _distinct(now: Any, *others: Any, least: int = 1) -> list[Any]:
    """Return the others that are at least that and not what is, each once."""
    return [other for other in dict.fromkeys(others) if other >= least and other != now]
