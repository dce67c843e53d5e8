"""What must hold of a run that was killed and taken up again, whatever was lost with the process. A second arithmetic, over events alone.

Nothing durable is lost but by age or by weights that are gone; no batch and no prompt of an epoch trains twice; nothing trains past the
bound; what a resume admits before the first new version fits into the batches that may take it; and the books of all lives close.
"""

from collections import Counter
from dataclasses import dataclass, field

import msgspec
from books import Books, check_books

from headway.events import (
    Admitted,
    BatchAcknowledged,
    BatchFormed,
    Continued,
    Ended,
    Finished,
    GroupDropped,
    Ingested,
    PromptDropped,
    Published,
    Ready,
    Resumed,
)

TAKEN_UP = {"interrupted", "lineage", "stale"}


@dataclass
class LifeBooks(Books):
    """Books that know of resumes. `evicted`: groups with something durable in them that a resume dropped, by cause."""

    interrupted: set = field(default_factory=set)
    batches: dict = field(default_factory=dict)
    stamps: dict = field(default_factory=dict)  # (oldest, newest) of what had finished, by group
    taking_up: bool = False
    continued: int = 0
    evicted: Counter = field(default_factory=Counter)
    prompts: dict = field(default_factory=dict)  # (id, epoch) by group
    ended_well: Counter = field(default_factory=Counter)  # prompts given up for good
    quarantined: set = field(default_factory=set)  # in any epoch
    budget: tuple = ()
    since: int = 0  # admissions of this life less those of them that were dropped
    first_group: int = 0
    outside: dict = field(default_factory=dict)  # names of groups that are not live
    durable_outside: set = field(default_factory=set)  # those of them of which all rollouts are
    gone_outside: dict = field(default_factory=dict)  # those of them that were dropped, by cause

    def read(self, event):
        if self.taking_up and not isinstance(event, Continued | GroupDropped | PromptDropped):
            self.taking_up = False
            if not isinstance(event, Resumed):  # the next process began before all of it was written
                self.taken_up()
        if getattr(event, "group", None) in self.outside:
            if isinstance(event, Ready):
                self.durable_outside.add(event.group)
            elif isinstance(event, GroupDropped):
                self.gone_outside[event.group] = event.cause
            return
        match event:
            case Ingested():
                self.outside[event.group] = event.name
                return
            case Resumed():
                self.resumed(event)
                return
            case Continued():
                self.interrupted.remove(event.group)
                self.running.add(event.group)
                self.in_flight += self.section.group_size - self.members[event.group]
                self.continued += 1
                return
            case Finished():
                oldest, newest = self.stamps.get(event.group, (event.head, event.tail))
                self.stamps[event.group] = min(oldest, event.head), max(newest, event.tail)
            case Admitted():
                self.prompts[event.group] = event.prompt_id, event.epoch
            case PromptDropped():
                self.ended_well[event.prompt_id, event.epoch] += 1
                if event.cause == "quarantined":
                    self.quarantined.add(event.prompt_id)
            case BatchFormed():
                self.batches[event.k] = event.groups
                event = msgspec.structs.replace(event, groups=tuple(group for group in event.groups if group not in self.outside))
            case BatchAcknowledged():
                assert event.k == self.trained, "a batch is acknowledged twice, or one was left out"
            case Published() if self.budget and event.version > self.budget[0]:
                self.budget = ()
        super().read(event)
        if isinstance(event, Admitted) and self.budget:
            self.since += 1
            version, k = self.budget
            places = self.section.groups_per_batch * max(0, min(version + self.section.max_staleness, self.steps - 1) - k + 1)
            assert self.since <= places or not self.at_admission or self.section.batch_tokens, "a burst after a resume"

    @property
    def replayed(self):
        """Groups in batches that are not live."""
        return {group for groups in self.batches.values() for group in groups if group in self.outside}

    @property
    def dropped_outside(self):
        return Counter(self.gone_outside.values())

    def places_taken(self, k):
        return sum(group in self.outside for group in self.batches[k])

    def resumed(self, event):
        assert event.version <= event.k
        self.resumes += 1
        self.exhausted = False
        self.taking_up = True
        self.interrupted |= self.running
        self.running = set()
        self.in_flight = 0
        in_batches = {group for k, groups in self.batches.items() for group in groups}
        for group in self.outside.keys() - self.gone_outside.keys() - in_batches - self.durable_outside:
            self.gone_outside[group] = "interrupted"  # its sender has had no answer
        for k in [k for k in self.batches if k >= event.k]:
            groups = set(self.batches.pop(k)) - self.outside.keys()
            self.shipped -= groups
            self.ready |= groups
        self.version, self.trained, self.k = event.version, event.version, event.k
        self.budget, self.since, self.first_group = (event.version, event.k), 0, max(self.births, default=-1) + 1

    def taken_up(self):
        assert not self.interrupted, "a group in flight was forgotten"
        if self.keeps_deadlines and not self.section.batch_tokens:
            self.assert_hall()
        oldest = self.k - self.section.max_staleness
        for group in self.ready:
            assert self.stamps[group][1] <= self.version, "a token of weights that are gone"
            assert self.section.on_stale != "mask" or self.stamps[group][1] >= oldest
            assert self.section.on_stale not in {"wait", "drop"} or self.births[group] >= oldest

    def drop(self, event):
        group = event.group
        if not event.requeued:
            self.ended_well[self.prompts[group]] += 1
        if self.budget and group >= self.first_group:
            self.since -= 1
        if not self.taking_up:
            super().drop(event)
            return
        durable = group in self.stamps
        self.cut_short += self.section.group_size - self.members[group]
        self.dropped[group] = event.cause
        assert event.cause in TAKEN_UP
        assert group in self.interrupted | self.ready
        assert (event.cause == "interrupted") <= (not durable), "finished work is lost, and nothing but the crash is to blame"
        if durable:
            self.evicted[event.cause] += 1
            oldest, newest = self.k - self.section.max_staleness, self.stamps[group][1]
            if event.cause == "lineage":
                assert newest > self.version or self.births[group] > self.version
            elif self.section.on_stale == "mask":
                assert newest < oldest, "a group that could have trained is evicted"
            else:
                assert self.births[group] < oldest or "no room" in event.detail or "have no room" in event.detail
        self.interrupted.discard(group)
        self.ready.discard(group)


def check_lives(result, section, steps, *, prompts=()):
    """Assert all of it; `prompts`: the (id, epoch) that the run was to train. Returns the books."""
    books = check_books(result, section, steps, books=LifeBooks(section, steps))
    assert books.resumes < result.lives
    assert isinstance(result.events[-1], Ended)
    world = result.world
    assert sorted(world.trained) == list(range(result.ledger.trained)), "a version was made of nothing"
    for k, batch in world.trained.items():
        assert result.batches[k] is batch, "the trainer saw another batch than the one that is kept"
        assert batch.groups == books.batches[k]
    trained = Counter(books.prompts[group] for batch in world.trained.values() for group in batch.groups if group in books.prompts)
    assert not [prompt for prompt, count in trained.items() if count > 1], "a prompt was trained twice in one epoch"
    names = Counter(books.outside[group] for group in books.replayed)
    assert not [name for name, count in names.items() if count > 1], "a replayed group was trained twice"
    left = Counter(books.prompts[group] for group in books.ready)
    assert not trained & left
    if prompts:
        wanted = {prompt for prompt in prompts if prompt[0] not in books.quarantined}
        missing = wanted - trained.keys() - books.ended_well.keys() - left.keys()
        assert not missing, f"{len(missing)} prompts of the epoch were never trained: {sorted(missing)[:3]}"
        assert trained.keys() <= set(prompts)
    return books
