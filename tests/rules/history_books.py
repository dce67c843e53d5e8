"""The books of a run that is driven through any order of events, and what must hold of ledger and books after each of them.

They are kept apart from the ledger and by other means; what must hold is counted out of them.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from small_world import ENDLESS, deadlines_hold

from headway.events import Published, Ready, Resumed
from headway.rules.admission import GateLimits, capacity, steps_ahead
from headway.rules.batching import can_form
from headway.rules.ledger import Ledger, apply
from headway.rules.replay import place, reserved

MODES = [("mask", "admission"), ("wait", "admission"), ("drop", "admission"), ("mask", "ship"), ("drop", "ship"), ("train", "admission")]


@dataclass
class Book:
    """What happened to one group. `stamps`: (oldest, newest) version of its finished members' tokens."""

    birth: int
    members: int
    prompt: str
    state: str = "running"  # running, ready, batched, gone
    ended: int = 0
    tokens: int = 0
    size: int = 0
    stamps: list = field(default_factory=list)
    lineage: str = ""
    tries: int = 0

    @property
    def tail(self):
        return max(self.stamps, default=self.birth)

    @property
    def head(self):
        return min(self.stamps, default=self.birth)


@dataclass
class Place:
    k: int
    durable: bool = False


@dataclass
class Kept:
    """A batch as it was formed."""

    lineage: str
    live: list
    places: dict
    ages: list


def drawn_limits(draw):
    """Return a configuration that the config would accept."""
    mode, enforce = draw.choice([*MODES, ("wait", "admission"), ("drop", "admission")])
    groups, members, bound = draw.randint(1, 4), draw.randint(1, 3), draw.randint(0, 4)
    by_tokens = draw.random() < 0.2
    return GateLimits(
        groups_per_batch=groups,
        group_size=members,
        max_concurrent=members * draw.choice([1, 3, 10, 40, 40]),
        steps_ahead=draw.choice([float(bound), float(bound), bound / 2, draw.randint(0, 4 * bound) / 4]),
        steps=draw.choice([ENDLESS, ENDLESS, 4]),
        max_staleness=bound,
        on_stale=mode,
        enforce=enforce,
        max_lead=draw.randint(0, 2),
        batch_tokens=groups * members * 4 if by_tokens else 0,
        replayed_groups=draw.choice([0, 0, 1, groups]),
        max_ready_groups=draw.choice([0, 1, 2 * groups]),
        max_ready_bytes=draw.choice([0, 0, 10]),
    )


class Books:
    """What has happened so far."""

    def __init__(self, draw):
        self.limits = drawn_limits(draw)
        self.lag = draw.choice([0, 0, 0, draw.randint(0, math.floor(self.limits.steps_ahead))])
        self.prompts_left = draw.choice([ENDLESS, ENDLESS, 30])
        self.ledger = Ledger()
        self.books, self.live, self.places, self.kept = {}, {}, {}, {}
        self.version = self.newest = self.k = self.waiting = 0
        self.again, self.failures, self.quarantined = {}, Counter(), set()  # prompts: tries of those that wait, failed groups in a row
        self.budget, self.admitted = None, set()  # after a crash: (version, k), and the groups admitted since that were not dropped
        self.failed_in_row = 0
        self.sizes = Counter()  # of groups from elsewhere
        self.parents: dict[str, str | None] = {"l0": None}
        self.lineage = "l0"
        self.seen = Counter()
        self.record(Published(0.0, 0, ("engine",)))

    def record(self, *events):
        for event in events:
            apply(self.ledger, event)
            match event:
                case Ready() if event.group in self.books:
                    self.failures[self.books[event.group].prompt] = self.failed_in_row = 0
                case Resumed():
                    self.budget, self.admitted, self.failed_in_row = (event.version, event.k), set(), 0

    def of(self, *states):
        return [group for group, book in self.live.items() if book.state in states]

    def _room(self, j):
        return (self.limits.groups_per_batch if j < self.limits.steps else 0) - sum(held.k == j for held in self.places.values())

    def check(self):
        self._check_counts()
        limits, ledger = self.limits, self.ledger
        live = [self.books[group].birth for group in self.of("running", "ready")]
        if limits.keeps_deadlines:
            assert deadlines_hold(live, self.k, limits.max_staleness, self._room), "H(k) is broken"
        assert capacity(ledger, limits) >= 0
        if not live and not self.places:
            self._check_no_leak()
        if not self.of("running") and all(held.durable for held in self.places.values()):
            self._check_no_deadlock()

    def _check_counts(self):
        ledger = self.ledger
        assert sorted(ledger.running) == sorted(self.of("running"))
        assert sorted(ledger.ready) == sorted(self.of("ready"))
        assert ledger.births == Counter(self.books[group].birth for group in self.of("running", "ready"))
        assert ledger.ready_births == Counter(self.books[group].birth for group in self.of("ready"))
        assert ledger.ready_tokens == sum(self.books[group].tokens for group in self.of("ready"))
        assert ledger.ready_size == sum(self.books[group].size for group in self.of("ready"))
        assert ledger.rollouts_in_flight == sum(self.books[group].members - self.books[group].ended for group in self.of("running"))
        assert {group: held.k for group, held in self.places.items()} == {group: promise.k for group, promise in ledger.ingested.items()}
        assert ledger.promised == Counter(held.k for held in self.places.values())
        assert ledger.awaited == Counter(held.k for held in self.places.values() if not held.durable)
        assert (ledger.version, ledger.trained, ledger.next_batch) == (self.version, self.newest, self.k)
        assert ledger.waiting_prompts == self.waiting
        assert ledger.waiting == {(prompt, 0): tries for prompt, tries in self.again.items()}
        assert {group: unit.tries for group, unit in ledger.running.items()} == {g: self.books[g].tries for g in self.of("running")}
        assert ledger.failures == {prompt: count for prompt, count in self.failures.items() if count}
        assert ledger.quarantined.keys() == self.quarantined
        assert ledger.failed_in_row == self.failed_in_row
        held = [self.books[group].size for group in self.of("running", "ready")]
        assert ledger.held_size == sum(held) + sum(self.sizes[group] for group in self.places)
        assert self._budget() == (None if self.budget is None else (*self.budget, len(self.admitted)))

    def _budget(self):
        budget = self.ledger.resume_budget
        return None if budget is None else (budget.version, budget.k, budget.admitted)

    def _check_no_leak(self):
        limits = self.limits
        ahead = min(limits.max_staleness, limits.steps_ahead if self.ledger.steps_ahead is None else self.ledger.steps_ahead)
        left = limits.groups_per_batch * (limits.steps - self.k)
        if limits.enforce == "admission":
            whole = max(0, self.version + math.floor(ahead) + 1 - self.k) * limits.groups_per_batch
            part = math.floor(ahead % 1 * limits.groups_per_batch) if self.version + math.floor(ahead) + 1 >= self.k else 0
            left = min(left, whole + part)
        elif self._born_too_old():
            left = 0
        assert capacity(self.ledger, limits) == max(0, min(left, limits.max_concurrent // limits.group_size)), "a leak"

    def _check_no_deadlock(self):
        limits, ledger = self.limits, self.ledger
        ahead = steps_ahead(ledger, limits)
        over = self.k >= limits.steps
        caught_up = not self._born_too_old() if limits.enforce == "ship" else self.k - self.version <= math.floor(ahead)
        if over or not caught_up:
            return
        fit = [group for group in self.of("ready") if not self._goes_stale(group)]
        if len(fit) < len(self.of("ready")):
            return  # they are dropped first: what holds then is judged then
        starts = capacity(ledger, limits) - reserved(ledger, limits, waiting=2)
        placed = limits.replayed_groups > 0 and place(ledger, limits) is not None
        ended = ledger.exhausted and not self.waiting and not fit and not self.places
        assert can_form(ledger, limits) or starts > 0 or placed or ended, "a deadlock"

    def _born_too_old(self):
        """Enforced at the shipper: nothing starts that is too old for the next batch at its birth."""
        return self.limits.on_stale != "train" and self.k - self.version > self.limits.max_staleness

    def _goes_stale(self, group):
        limits, book = self.limits, self.books[group]
        oldest = self.k - limits.max_staleness
        return (limits.on_stale == "mask" and book.tail < oldest) or (limits.enforce == "ship" and book.birth < oldest)
