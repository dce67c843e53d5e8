"""Every state that a small run can get into: breadth first over the real ledger and the real rules, in any order of events.

A state is written relative to k, so that a run without end has finitely many. What holds in it is stated here anew, by counting, and
never by calling the rules that are judged.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

from headway.events import Admitted, BatchAcknowledged, BatchFormed, Finished, GroupDropped, Ingested, PaceChanged, Published, Ready
from headway.rules.admission import GateLimits, capacity, capacity_by_staleness
from headway.rules.batching import can_form, chosen, groups_to_take, in_the_way, may_form
from headway.rules.ledger import Ledger, apply
from headway.rules.replay import place, reserved
from headway.rules.view import Promise, Unit

K = 1000  # where k stands in the ledger that a relative state is unfolded into
ENDLESS = 10**9


def deadlines_hold(births, k, bound, room):
    """H(k), as STALENESS.md writes it: for every d >= k - 1, N(d) <= sum of Bmin(j), j = k..d. `room(j)` is Bmin(j)."""
    last = max([k - 1, *(birth + bound for birth in births)])
    return all(sum(birth + bound <= d for birth in births) <= sum(room(j) for j in range(k, d + 1)) for d in range(k - 1, last + 1))


def fewest_to_lose(births, k, bound, room):
    """The least number of groups without which H(k) holds: the largest excess at any deadline."""
    last = max([k - 1, *(birth + bound for birth in births)])
    return max(sum(birth + bound <= d for birth in births) - sum(room(j) for j in range(k, d + 1)) for d in range(k - 1, last + 1))


@dataclass(frozen=True)
class State:
    """Ages count back from k: of versions, births and stamps. `promised`: (batch - k, durable) of each place that is held."""

    lag: int
    untrained: int
    running: tuple = ()  # age of birth
    ready: tuple = ()  # (age of birth, age of the newest stamp, tokens)
    promised: tuple = ()
    pace: float | None = None


@dataclass
class Found:
    states: int = 0
    moves: Counter = field(default_factory=Counter)
    most_stale: int = -1


class SmallWorld:
    """One configuration. `paces`: what A may change to at any time; `tokens`: what a group may come to."""

    def __init__(self, limits: GateLimits, *, paces=(), tokens=(1,)):
        self.limits = limits
        self.paces = paces
        self.tokens = tokens
        self.found = Found()

    def search(self):
        """Visit every state; raise AssertionError at the first that is wrong, with the way to it."""
        first = State(0, 0)
        came_from: dict[State, tuple[str, State] | None] = {first: None}
        waiting = [first]
        while waiting:
            state = waiting.pop()
            try:
                self._check(state)
                following = list(self._moves(state))
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self.limits}\n" + "\n".join(self._way(came_from, state))) from error
            for name, after in following:
                self.found.moves[name] += 1
                if after not in came_from:
                    came_from[after] = (name, state)
                    waiting.append(after)
        self.found.states = len(came_from)
        return self.found

    def _way(self, came_from, state):
        lines = [str(state)]
        while came_from[state] is not None:
            name, state = came_from[state]
            lines += [name, str(state)]
        return reversed(lines)

    def _unfold(self, state):
        """Return the ledger of a state, and the newest stamp of each ready group."""
        ledger = Ledger(version=K - state.lag, next_batch=K, trained=K - state.untrained, steps_ahead=state.pace)
        tails = {}
        for age in state.running:
            unit = Unit(f"p{ledger.next_group}", 0, K - age, 1)
            ledger.running[ledger.next_group] = unit
            ledger.births[unit.birth] = ledger.births.get(unit.birth, 0) + 1
            ledger.next_group += 1
        for age, tail, tokens in state.ready:
            unit = Unit(f"p{ledger.next_group}", 0, K - age, 1, ended=1, tokens=tokens)
            ledger.ready[ledger.next_group] = unit
            ledger.ready_tokens += tokens
            tails[ledger.next_group] = K - tail
            for births in (ledger.births, ledger.ready_births):
                births[unit.birth] = births.get(unit.birth, 0) + 1
            ledger.next_group += 1
        for ahead, durable in state.promised:
            ledger.ingested[ledger.next_group] = Promise(K + ahead, durable)
            ledger.promised[K + ahead] = ledger.promised.get(K + ahead, 0) + 1
            if not durable:
                ledger.awaited[K + ahead] = ledger.awaited.get(K + ahead, 0) + 1
            ledger.next_group += 1
        ledger.rollouts_in_flight = len(ledger.running)
        return ledger, tails

    def _fold(self, ledger, tails):
        """Return the state of a ledger. What is past the bound is alike, however far."""
        k, oldest = ledger.next_batch, self.limits.max_staleness + 1
        age = (lambda version: k - version) if self.limits.keeps_deadlines else (lambda version: min(oldest, k - version))
        stamp = age if self.limits.on_stale == "mask" else (lambda _: 0)
        return State(
            lag=k - ledger.version,
            untrained=k - ledger.trained,
            running=tuple(sorted(age(unit.birth) for unit in ledger.running.values())),
            ready=tuple(sorted((age(unit.birth), stamp(tails[group]), unit.tokens) for group, unit in ledger.ready.items())),
            promised=tuple(sorted((promise.k - k, promise.ready) for promise in ledger.ingested.values())),
            pace=ledger.steps_ahead,
        )

    def _room(self, ledger):
        return lambda j: self.limits.groups_per_batch - sum(promise.k == j for promise in ledger.ingested.values())

    def _check(self, state):
        ledger, tails = self._unfold(state)
        limits, k = self.limits, ledger.next_batch
        births = [unit.birth for unit in chain(ledger.running.values(), ledger.ready.values())]
        if limits.keeps_deadlines:
            assert deadlines_hold(births, k, limits.max_staleness, self._room(ledger)), "H(k) is broken"
        if not births and not ledger.ingested:
            assert capacity(ledger, limits) == self._full(ledger), "a leak: nothing is live, and capacity is not full"
        if ledger.running or ledger.awaited:
            return
        self._drop_stale(ledger, tails)
        if state.lag <= (limits.max_staleness if limits.enforce == "ship" else int(self._ahead(ledger))):
            assert can_form(ledger, limits) or capacity(ledger, limits) > 0, "a deadlock"
            starts = capacity(ledger, limits) - reserved(ledger, limits, waiting=3)
            assert can_form(ledger, limits) or starts > 0 or place(ledger, limits) is not None, "slots are kept for nobody"

    def _ahead(self, ledger):
        return min(self.limits.max_staleness, self.limits.steps_ahead if ledger.steps_ahead is None else ledger.steps_ahead)

    def _full(self, ledger):
        limits = self.limits
        if limits.enforce == "ship":  # what would be too old at its birth does not start
            return limits.max_concurrent if ledger.version + limits.max_staleness >= ledger.next_batch else 0
        ahead = self._ahead(ledger)
        whole = max(0, ledger.version + int(ahead) - ledger.next_batch + 1) * limits.groups_per_batch
        part = int((ahead - int(ahead)) * limits.groups_per_batch) * (ledger.version + int(ahead) + 1 >= ledger.next_batch)
        return min(whole + part, limits.max_concurrent)

    def _moves(self, state):
        ledger, stamps = self._unfold(state)
        limits = self.limits
        if capacity(ledger, limits) > 0:
            yield "admit", self._after(state, Admitted(0.0, ledger.next_group, "p", 0, 1, ledger.version))
        for group, unit in _unlike(ledger.running, lambda group: ledger.running[group].birth):
            tails = range(unit.birth, ledger.version + 1) if limits.on_stale == "mask" else [unit.birth]
            for tail in tails:
                for tokens in self.tokens:
                    finished = Finished(0.0, group, 0, 0, 1.0, tokens, 1, unit.birth, tail)
                    yield "finish", self._after(state, finished, Ready(0.0, group, zero_advantage=False), tails={group: tail})
            yield "fail", self._after(state, GroupDropped(0.0, group, "incomplete", "", 0, requeued=False))
        for group, _ in _unlike(ledger.ready, lambda group: (ledger.ready[group].birth, stamps[group], ledger.ready[group].tokens)):
            yield "filter late", self._after(state, GroupDropped(0.0, group, "filtered", "", 0))
        if ledger.trained < ledger.next_batch:
            yield "train", self._after(state, BatchAcknowledged(0.0, ledger.trained))
        for version in range(ledger.version + 1, ledger.trained + 1):
            yield "publish", self._after(state, Published(0.0, version, ("engine",)))
        for pace in self.paces:
            yield "pace", self._after(state, PaceChanged(0.0, pace, 1.0, 1.0))
        yield from self._replay_moves(state, ledger)
        if may_form(ledger, limits.max_lead):
            after = self._formed(state)
            if after is not None:
                yield "form", after

    def _replay_moves(self, state, ledger):
        j = place(ledger, self.limits) if self.limits.replayed_groups else None
        if j is not None:
            promised = Ingested(0.0, ledger.next_group, "them", "replay", 1, j)
            after, _ = self._unfold(state)
            apply(after, promised)
            assert capacity_by_staleness(after, self.limits) >= 0, "a place for replay undid an admission"
            yield "place", self._after(state, promised)
        for group, promise in _unlike(ledger.ingested, lambda group: (ledger.ingested[group].k, ledger.ingested[group].ready)):
            if not promise.ready:
                yield "place filled", self._after(state, Ready(0.0, group, zero_advantage=False))
            yield "place lost", self._after(state, GroupDropped(0.0, group, "incomplete", "", 0))

    def _after(self, state, *events, tails=None):
        ledger, stamps = self._unfold(state)
        for event in events:
            apply(ledger, event)
        return self._fold(ledger, stamps | (tails or {}))

    def _drop_stale(self, ledger, tails):
        if self.limits.on_stale == "mask":
            oldest = ledger.next_batch - self.limits.max_staleness
            for group in [group for group in ledger.ready if tails[group] < oldest]:
                apply(ledger, GroupDropped(0.0, group, "stale", "", 0, requeued=False))
        elif self.limits.enforce == "ship":
            for group in in_the_way(ledger, self.limits, 0):
                apply(ledger, GroupDropped(0.0, group, "stale", "", 0, requeued=False))

    def _formed(self, state):
        """Form batch k, as far as the mode allows; check what is in it and what was lost for it."""
        ledger, tails = self._unfold(state)
        limits, k, bound = self.limits, ledger.next_batch, self.limits.max_staleness
        self._drop_stale(ledger, tails)
        n = groups_to_take(ledger, limits)
        if n < 0:
            return None
        by_age = sorted(ledger.ready, key=lambda group: (ledger.ready[group].birth, group))
        running = [unit.birth for unit in ledger.running.values()]
        others = [*running, *(ledger.ready[group].birth for group in by_age[n:])]
        room = self._room(ledger)
        if limits.on_stale == "wait":
            assert can_form(ledger, limits) == deadlines_hold(others, k + 1, bound, room), "wait is not H(k + 1)"
        if not can_form(ledger, limits):
            return None
        if limits.on_stale == "drop":
            gone = in_the_way(ledger, limits, n)
            if limits.keeps_deadlines:
                assert len(gone) == max(0, fewest_to_lose(others, k + 1, bound, room)), "drop loses more than it must, or less"
                assert set(gone) <= set(ledger.running), "drop loses what is ready"
            for group in gone:
                apply(ledger, GroupDropped(0.0, group, "stale", "", 0))
        groups = chosen(ledger, n)
        taken = [group for group in groups if group in ledger.ready]
        assert len(groups) >= limits.groups_per_batch, "a batch is too small"
        ages = [k - (tails[group] if limits.on_stale == "mask" else ledger.ready[group].birth) for group in taken]
        assert max(ages, default=0) <= bound, "something over the bound is in the batch"
        self.found.most_stale = max([self.found.most_stale, *ages])
        apply(ledger, BatchFormed(0.0, k, tuple(groups), 0.0))
        return self._fold(ledger, tails)


def _unlike(groups, key):
    """Return one of each kind: states do not tell alike ones apart."""
    return {key(group): (group, entry) for group, entry in groups.items()}.values()
