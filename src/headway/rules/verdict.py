"""Whether a journal's next event is one that the rules allow, or ask for, in the state that its history has led to.

A journal holds the decisions of a run as facts. Folded again (`rules.ledger.apply`) it leads through the same states, so every decision can
be made again and compared: admissions by capacity and birth, batches by who is in them, drops by who had to go, publications by what was
trained. What the world did (which rollout ended when, with which reward) is taken as told. `Judge` says what does not fit, and never
changes the ledger.

A rollout counts as ended once it is durable, which a journal may tell before an admission that came first: with respect to max_concurrent
a decision is held against the state that allows the most. What is given up as a run is taken up again follows from what lay on disk then
(`rules.resume`), which no journal tells: these drops are taken as told as well.
"""

from __future__ import annotations

from headway.events import (
    Admitted,
    AnyEvent,
    BatchAcknowledged,
    BatchFormed,
    Continued,
    EvalStarted,
    Finished,
    GroupDropped,
    Ingested,
    PaceChanged,
    PromptDropped,
    Published,
    Ready,
    Resumed,
)
from headway.rules.admission import GateLimits, capacity, capacity_reason, over_resume_budget, steps_ahead
from headway.rules.batching import MAX_REQUEUES, can_form, chosen, groups_to_take, in_the_way, may_form
from headway.rules.pacing import next_steps_ahead
from headway.rules.replay import place
from headway.rules.staleness import oldest_contributing
from headway.rules.view import LedgerView


class Judge:
    """Holds events against the rules, one after the other, each before it is folded. `limits` None: the config of that time is unknown."""

    def __init__(self, limits: GateLimits | None) -> None:
        self.limits = limits
        self._tails: dict[int, int] = {}  # the newest stamp in each live group that is not in a batch
        self._taking_up = False  # amid the events that a run begins with when it is taken up again

    def divergence(self, ledger: LedgerView, event: AnyEvent) -> str:
        """Return what the rules say otherwise; "": nothing."""
        follows = self._taking_up and isinstance(event, (Continued, GroupDropped, PromptDropped))
        self._taking_up = follows or isinstance(event, Resumed)
        said = self._by_history(ledger, event)
        if not said and self.limits is not None and not self._taking_up:
            said = _by_limits(ledger, self.limits, event, self._tails)
        self._remember(event)
        return said

    def _by_history(self, ledger: LedgerView, event: AnyEvent) -> str:
        """What holds under any config."""
        match event:
            case Admitted(birth=birth) if birth != ledger.version:
                return f"group {event.group} is born at version {birth}, and version {ledger.version} is served"
            case Admitted() if ledger.draining:
                return f"group {event.group} is admitted, and the run drains: {ledger.draining}"
            case Finished() if event.group in ledger.running and event.tail > ledger.trained:
                return f"rollout {event.group}-{event.member} has tokens of version {event.tail}, and the newest is {ledger.trained}"
            case Ready() if (unit := ledger.running.get(event.group)) is not None and unit.ended < unit.members:
                return f"group {event.group} is ready, and {unit.members - unit.ended} of its {unit.members} members have not ended"
            case BatchAcknowledged(k=k) if k != ledger.trained:
                return f"batch {k} is trained, and the next to be trained is {ledger.trained}"
            case Published(version=version) if not ledger.version <= version <= ledger.trained:
                return f"version {version} is published after {ledger.version}, and the newest that is trained is {ledger.trained}"
            case EvalStarted(version=version) if version != ledger.version:
                return f"version {version} is evaluated, and version {ledger.version} is served"
        return ""

    def _remember(self, event: AnyEvent) -> None:
        match event:
            case Finished(group=group):
                self._tails[group] = max(event.tail, self._tails.get(group, -1))
            case GroupDropped(group=group):
                self._tails.pop(group, None)


def _by_limits(ledger: LedgerView, limits: GateLimits, event: AnyEvent, tails: dict[int, int]) -> str:
    match event:
        case Admitted():
            return _admitted(ledger, limits, event)
        case Ingested():
            expected = place(ledger, limits)
            if event.k != expected:
                where = "nowhere" if expected is None else f"in batch {expected}"
                return f"group {event.group} is given a place in batch {event.k}; by the rules, {where}"
        case BatchFormed():
            return _formed(ledger, limits, event)
        case GroupDropped(cause="stale"):
            return _stale(ledger, limits, event, tails)
        case PaceChanged():
            now = steps_ahead(ledger, limits)
            expected_ahead = next_steps_ahead(now, ledger.latency_seconds, ledger.cycle_seconds, limits.max_staleness)
            if abs(event.steps_ahead - expected_ahead) > 1e-9:
                return f"steps_ahead goes from {now:g} to {event.steps_ahead:g}; by the rules, to {expected_ahead:g}"
        case _:
            pass
    return ""


def _admitted(ledger: LedgerView, limits: GateLimits, event: Admitted) -> str:
    if event.members != limits.group_size:
        return f"group {event.group} has {event.members} members, and rollout.group_size is {limits.group_size}"
    if capacity(ledger, limits) < 1:
        return f"group {event.group} is admitted; by the rules none may start: {capacity_reason(ledger, limits)}"
    return over_resume_budget(ledger, limits)


def _formed(ledger: LedgerView, limits: GateLimits, event: BatchFormed) -> str:
    k = event.k
    if not may_form(ledger, limits.max_lead):
        return f"batch {k} is formed {k - ledger.trained} ahead of training, and rollout.max_lead is {limits.max_lead}"
    if not can_form(ledger, limits):
        why = "it would leave groups without room in time" if groups_to_take(ledger, limits) >= 0 else "too few groups are ready"
        return f"batch {k} is formed; by the rules it may not be yet: {why}"
    n = groups_to_take(ledger, limits)
    if limits.on_stale == "drop" and (gone := in_the_way(ledger, limits, n)):
        return f"batch {k} is formed; by the rules {_named(gone)} must go first"
    expected = chosen(ledger, n)
    if [*event.groups] != expected:
        others, missing = _without(event.groups, expected), _without(expected, event.groups)
        if not others and not missing:
            return f"batch {k} holds its groups in another order than the rules put them"
        return f"batch {k} holds {_named(others)}; by the rules {_named(missing)}"
    return ""


def _stale(ledger: LedgerView, limits: GateLimits, event: GroupDropped, tails: dict[int, int]) -> str:
    group, k = event.group, ledger.next_batch
    unit = ledger.running.get(group) or ledger.ready.get(group)
    if unit is None:
        return ""
    tries = ledger.requeued.get((unit.prompt_id, unit.epoch), 0)
    if event.requeued != (tries < MAX_REQUEUES):
        again = "" if tries < MAX_REQUEUES else "not "
        return f"group {group} is dropped as stale for the {tries + 1}. time; by the rules its prompt is {again}tried again"
    if limits.on_stale == "drop":
        gone = in_the_way(ledger, limits, max(0, groups_to_take(ledger, limits)))
        oldest_kept = max((_birth(ledger, other) for other in gone), default=-1)
        if unit.birth > oldest_kept:
            return f"group {group} (birth {unit.birth}) is dropped as stale; by the rules {_named(gone)}"
        return ""
    tail = tails.get(group, -1)
    if group in ledger.running or tail >= oldest_contributing(k, limits.max_staleness):
        return f"group {group} is dropped as stale before batch {k}; by the rules its tokens of version {tail} may still train"
    return ""


def _birth(ledger: LedgerView, group: int) -> int:
    return (ledger.running.get(group) or ledger.ready[group]).birth


def _without(groups: tuple[int, ...] | list[int], others: tuple[int, ...] | list[int]) -> list[int]:
    known = set(others)
    return [group for group in groups if group not in known]


def _named(groups: list[int]) -> str:
    if not groups:
        return "none"
    more = f" and {len(groups) - 8} more" if len(groups) > 8 else ""
    return f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups[:8]))}{more}"
