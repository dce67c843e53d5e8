"""The end of a process at any point, and what the next one goes on with: lost, alien and surplus entries, rollbacks, broken batches."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from history_books import Books, Place
from small_world import deadlines_hold

from headway.events import Continued, Finished, Ready, Resumed
from headway.rules.lineage import line_of
from headway.rules.resume import CompleteGroup, PersistedBatch, UnfinishedGroup, resume_plan


class Crashes(Books):
    _admitted: Callable[..., Any]  # by whoever drives the history
    _lose: Callable[..., Any]

    def crash(self, draw):
        """The process ends at any point; the next one finds what is on disk, and possibly not all, or more than there should be."""
        version = draw.choice([self.newest, self.newest, draw.randint(max(0, self.newest - 3), self.newest)])
        if version < self.version or draw.random() < 0.2:  # weights that had been served exist no more
            child = f"l{len(self.parents)}"
            self.parents[child] = f"{self.lineage}-{version}"
            self.lineage = child
        self._surplus(draw)
        lost = [group for group in self.of("ready") if draw.random() < 0.1]
        for group in self.of("ready"):
            if draw.random() < 0.05:
                self.books[group].lineage = "theirs"
        batches = self._persisted(version, draw)
        plan = self._plan(version, batches, lost)
        self._evicted_for_a_reason(plan, version, lost)
        if draw.random() < 0.3:
            plan = self._died_again(plan, batches, lost, draw)
        self._resumed(plan)
        self.seen["crashes"] += 1

    def _plan(self, version, batches, lost):
        return resume_plan(
            version=version,
            line=line_of(self.lineage, self.parents),
            batches=batches,
            ready=[self._complete(group) for group in self.of("ready") if group not in lost],
            running=[self._unfinished(group, lost) for group in [*self.of("running"), *lost] if group in self.live],
            limits=self.limits,
            promised=self._promised_after(version),
        )

    def _evicted_for_a_reason(self, plan, version, lost):
        """Nothing that is durable goes but for its lineage or its age: every group is in the plan once."""
        running = [group for group in [*self.of("running"), *lost] if self._unfinished(group, lost).finished == 0]
        assert sorted(plan.interrupted) == sorted(running)
        dissolved = [group for k in plan.dissolved for group in self.kept[k].live]
        durable = [group for group in [*self.of("ready", "running"), *dissolved] if group not in running]
        assert sorted([*plan.kept, *plan.continued, *(entry.group for entry in plan.evicted)]) == sorted(durable)
        assert {entry.reason for entry in plan.evicted} <= {"alien", "newer", "over age", "no room"}
        if self.limits.keeps_deadlines:
            promised = self._promised_after(version)
            births = [self.books[group].birth for group in [*plan.kept, *plan.continued]]

            def room(j):
                return (self.limits.groups_per_batch if j < self.limits.steps else 0) - promised[j]

            assert deadlines_hold(births, plan.k, self.limits.max_staleness, room), "H(k) is broken by the plan"

    def _died_again(self, plan, batches, lost, draw):
        """The process that took the run up dies with a part of it recorded; the next plans the same."""
        self._begin_again(plan)
        steps = self._steps(plan)
        for group, cause in steps[: draw.randint(0, len(steps))]:
            self._step(group, cause)
        again = self._plan(plan.version, [batch for batch in batches if batch.k < plan.k], lost)
        assert (again.k, again.kept, again.continued, again.ship_again) == (plan.k, plan.kept, plan.continued, plan.ship_again)
        self.seen["died again"] += 1
        return again

    def _surplus(self, draw):
        """Complete groups that no gate has counted, as a foreign snapshot might hold them."""
        for _ in range(draw.choice([0, 0, 0, 5, 20])):
            group = self._admitted(draw.randint(max(0, self.version - 2), self.version), 1)
            self.books[group].ended, self.books[group].tokens = 1, 2
            self.books[group].stamps += [self.books[group].birth, self.version]
            self.books[group].state = "ready"
            stamps = self.books[group].stamps
            self.record(Finished(0.0, group, 0, 0, 1.0, 2, 1, *stamps), Ready(0.0, group, zero_advantage=False))
            self.seen["surplus"] += 1

    def _persisted(self, version, draw):
        known = [k for k in range(version, self.k) if k in self.ledger.formed]
        return [
            PersistedBatch(
                k=k,
                lineage=self.kept[k].lineage,
                newest=max((self.books[group].tail for group in self.kept[k].live), default=0),
                valid=draw.random() < 0.8,
                max_staleness=self.limits.max_staleness,
                on_stale=self.limits.on_stale,
                groups=tuple(self._complete(group) for group in self.kept[k].live),
            )
            for k in known
        ]

    def _complete(self, group):
        book = self.books[group]
        return CompleteGroup(group=group, birth=book.birth, head=book.head, tail=book.tail, lineage=book.lineage)

    def _unfinished(self, group, lost):
        book = self.books[group]
        finished = 0 if group in lost else len(book.stamps) // 2
        head, tail = (book.head, book.tail) if finished else (-1, -1)
        return UnfinishedGroup(group=group, birth=book.birth, finished=finished, head=head, tail=tail, lineage=book.lineage)

    def _promised_after(self, version):
        durable = Counter(held.k for held in self.places.values() if held.durable)
        formed = [self.kept[k] for k in range(version, self.k) if k in self.ledger.formed]
        return durable + Counter(k for batch in formed for k in batch.places.values())

    def _begin_again(self, plan):
        for k in range(plan.version, self.k):
            again = self.kept[k] if k >= plan.k and k in self.ledger.formed else None
            if again:
                self.places |= {group: Place(held, durable=True) for group, held in again.places.items()}
                for group in again.live:
                    self.live[group] = self.books[group]
                    self.books[group].state = "ready"
        self.record(Resumed(0.0, plan.version, plan.k, self.lineage))
        assert (self.ledger.running, self.ledger.rollouts_in_flight) == ({}, 0)
        self.places = {group: held for group, held in self.places.items() if held.durable and held.k >= plan.k}
        self.version, self.newest, self.k = plan.version, plan.version, plan.k

    def _steps(self, plan):
        """Return what is recorded of each group, in order: None for one that goes on, the cause for one that is dropped."""
        causes = {"alien": "lineage", "newer": "lineage", "over age": "stale", "no room": "stale"}
        evicted = [(entry.group, causes[entry.reason]) for entry in plan.evicted]
        return [*((group, None) for group in plan.continued), *evicted, *((group, "interrupted") for group in plan.interrupted)]

    def _step(self, group, cause):
        if cause is None:
            self.record(Continued(0.0, group))
        else:
            self._lose(group, cause, requeued=True)

    def _resumed(self, plan):
        self._begin_again(plan)
        for group, cause in self._steps(plan):
            self._step(group, cause)
        assert sorted(self.of("ready")) == sorted(plan.kept), "the ledger keeps others than the plan does"
        assert sorted(self.of("running")) == sorted(self.ledger.running) == sorted(plan.continued)
        assert not self.ledger.interrupted
        line = line_of(self.lineage, self.parents)
        for group in [*plan.kept, *plan.continued]:
            book = self.books[group]
            assert book.tail <= plan.version
            assert book.lineage == line.lineage or book.tail <= line.forks[book.lineage]
        assert plan.ship_again == tuple(range(plan.version, plan.k))
        self.seen.update({"kept": len(plan.kept), "dissolved": len(plan.dissolved), "shipped again": len(plan.ship_again)} | plan.counts)
        self.seen["continued"] += len(plan.continued)
        for k in plan.ship_again:
            assert max((self.books[group].tail for group in self.kept[k].live), default=0) <= plan.version
            if self.limits.on_stale != "train":
                assert max(self.kept[k].ages, default=0) <= self.limits.max_staleness
