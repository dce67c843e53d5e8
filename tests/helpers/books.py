"""The books that every simulated run must close, whatever happened in it.

The arithmetic is a second one: sums over the events of the journal, with neither the ledger nor the rules that the run decides by.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

from headway.events import (
    Admitted,
    BatchAcknowledged,
    BatchFormed,
    Ended,
    Finished,
    GroupDropped,
    Published,
    Ready,
    RolloutDropped,
    SourceExhausted,
)
from headway.settings import RolloutSection


@dataclass
class Books:
    """What the journal adds up to."""

    section: RolloutSection
    steps: int
    version: int = -1
    k: int = 0
    trained: int = 0
    births: dict = field(default_factory=dict)  # of every group ever admitted
    members: Counter = field(default_factory=Counter)  # ended while their group ran, by group
    running: set = field(default_factory=set)
    ready: set = field(default_factory=set)
    shipped: set = field(default_factory=set)
    dropped: dict = field(default_factory=dict)
    in_flight: int = 0
    exhausted: bool = False
    resumes: int = 0
    cut_short: int = 0  # members that were running when their group was dropped
    ended: set = field(default_factory=set)
    tokens: Counter = field(default_factory=Counter)  # sampled, of finished rollouts, by group
    failed_tokens: int = 0

    @property
    def live(self):
        return len(self.running) + len(self.ready)

    @property
    def at_admission(self):
        return self.section.enforce == "admission" and self.section.on_stale != "train"

    @property
    def keeps_deadlines(self):
        return self.at_admission and self.section.on_stale in {"wait", "drop"}

    def room(self, last):
        """How many groups batches k..last take."""
        return self.section.groups_per_batch * max(0, min(last, self.steps - 1) - self.k + 1)

    def intake(self, ahead):
        """How many groups batches k..v+A take; of a fractional A the last batch's part, rounded down."""
        last = self.version + math.floor(ahead)
        part = Fraction(str(ahead)) % 1 if self.k <= last + 1 < self.steps else 0
        return self.room(last) + math.floor(part * self.section.groups_per_batch)

    def assert_hall(self):
        """H(k), deadline by deadline."""
        born = [self.births[group] for group in self.running | self.ready]
        for due in range(self.k - 1, self.k + self.section.max_staleness + 1):
            assert sum(birth + self.section.max_staleness <= due for birth in born) <= self.room(due), f"H({self.k}) is broken at {due}"

    def admit(self, event):
        assert event.group not in self.births
        assert event.birth == self.version
        self.births[event.group] = event.birth
        self.running.add(event.group)
        self.in_flight += event.members
        assert self.in_flight <= self.section.max_concurrent
        if self.at_admission and self.section.steps_ahead != "auto" and not self.section.batch_tokens:
            assert self.live <= self.intake(self.section.steps_ahead), "more started than the batches ahead take"

    def end_member(self, event):
        if event.group in self.running:
            self.members[event.group] += 1
            self.in_flight -= 1
        else:
            assert event.group in self.dropped, "a rollout of a complete group goes on"
        assert (event.group, event.member) not in self.ended, "a rollout ended twice"
        self.ended.add((event.group, event.member))

    def drop(self, event):
        assert event.group in self.running | self.ready
        if event.group in self.running:
            cut_short = self.section.group_size - self.members[event.group]
            self.cut_short += cut_short
            self.in_flight -= cut_short
        self.running.discard(event.group)
        self.ready.discard(event.group)
        self.dropped[event.group] = event.cause

    def form(self, event):
        assert event.k == self.k
        assert event.k - self.trained <= self.section.max_lead
        chosen = [self.births[group] for group in event.groups]
        assert set(event.groups) <= self.ready
        left = [self.births[group] for group in self.ready - set(event.groups)]
        assert not left or max(chosen, default=-1) <= min(left), "an older group was left behind"
        if self.keeps_deadlines:
            assert min(chosen, default=event.k) + self.section.max_staleness >= event.k
        if not self.section.batch_tokens:
            rest = self.exhausted and not left and not self.running
            taken = len(chosen) + self.places_taken(event.k)
            short = rest and taken < self.section.groups_per_batch
            assert taken == self.section.groups_per_batch or short or self.section.replayed_groups
        self.ready -= set(event.groups)
        self.shipped |= set(event.groups)
        self.k += 1
        if self.keeps_deadlines and not self.section.batch_tokens:
            self.assert_hall()

    @property
    def replayed(self):
        """Groups in batches that are not live."""
        return set()

    @property
    def dropped_outside(self):
        """Drops of groups that are not live, by cause."""
        return Counter()

    def places_taken(self, k):
        """How many places of a batch groups have that are not live."""
        return 0

    def read(self, event):
        match event:
            case SourceExhausted():
                self.exhausted = True
            case Published():
                assert self.version <= event.version <= self.trained
                self.version = event.version
            case BatchAcknowledged():
                self.trained = event.k + 1
            case Admitted():
                self.admit(event)
            case Finished():
                self.tokens[event.group] += event.sampled_tokens
                self.end_member(event)
            case RolloutDropped(finished=False):
                self.failed_tokens += event.sampled_tokens
                if event.final:
                    self.end_member(event)
            case Ready():
                assert event.group in self.running
                assert self.members[event.group] == self.section.group_size
                self.running.discard(event.group)
                self.ready.add(event.group)
            case GroupDropped():
                self.drop(event)
            case BatchFormed():
                self.form(event)


def check_books(result, section, steps, *, books=None):
    """Assert the bound, and that what was admitted adds up to what became of it. Returns the books.

    `books`: those to keep, in place of plain ones.
    """
    books = books or Books(section, steps)
    for event in result.events:
        books.read(event)
    assert len(books.births) == len(books.shipped) + len(books.dropped) + len(books.ready), "a group has no ending, or two"
    assert len(books.births) * section.group_size == sum(books.members.values()) + books.cut_short, "a rollout has no ending, or two"
    assert (books.running, books.in_flight) == (set(), 0), "something is in flight after the end"
    assert result.peak <= section.max_concurrent
    assert sorted(result.batches) == list(range(books.k))
    assert {group for batch in result.batches.values() for group in batch.groups} == books.shipped | books.replayed
    assert (result.ledger.running, result.ledger.rollouts_in_flight) == ({}, 0)
    assert set(result.ledger.ready) == books.ready
    assert Counter(result.ledger.dropped) - Counter(books.dropped.values()) == books.dropped_outside
    assert not Counter(books.dropped.values()) - Counter(result.ledger.dropped)
    in_batches = sum(sum(batch.tokens.values()) + sum(batch.masked.values()) for batch in result.batches.values())
    assert in_batches == sum(books.tokens[group] for group in books.shipped), "a token of a batch is neither trained nor masked"
    assert books.tokens.total() + books.failed_tokens <= result.sampled_tokens, "a token came from nowhere"
    if result.lives == 1 and not books.cut_short and not result.ledger.lost:
        assert books.tokens.total() == result.sampled_tokens, "a token that an engine wrote has no row"
    assert isinstance(result.events[-1], Ended)
    if section.on_stale != "train":
        for batch in result.batches.values():
            assert max(batch.tokens, default=0) <= section.max_staleness, "a token over the bound"
            assert batch.oldest_contributing is None or batch.oldest_contributing >= batch.k - section.max_staleness
    return books
