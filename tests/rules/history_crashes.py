"""The end of a process at any point, and what the next one goes on with: lost, alien and surplus entries, rollbacks, broken batches."""

from collections import Counter

from history_books import Books, Place

from headway.events import Finished, Ready, Resumed
from headway.rules.lineage import line_of
from headway.rules.resume import CompleteGroup, PersistedBatch, resume_plan


class Crashes(Books):
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
        plan = resume_plan(
            version=version,
            line=line_of(self.lineage, self.parents),
            batches=batches,
            ready=[self._complete(group) for group in self.of("ready") if group not in lost],
            running=[*self.of("running"), *lost],
            limits=self.limits,
            promised=self._promised_after(version),
        )
        self._resumed(plan, draw)
        self.seen["crashes"] += 1

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
                groups=tuple(self._complete(group) for group in self.kept[k].live),
            )
            for k in known
        ]

    def _complete(self, group):
        book = self.books[group]
        return CompleteGroup(group=group, birth=book.birth, head=book.head, tail=book.tail, lineage=book.lineage)

    def _promised_after(self, version):
        durable = Counter(held.k for held in self.places.values() if held.durable)
        formed = [self.kept[k] for k in range(version, self.k) if k in self.ledger.formed]
        return durable + Counter(k for batch in formed for k in batch.places.values())

    def _resumed(self, plan, draw):
        for k in range(plan.version, self.k):
            again = self.kept[k] if k >= plan.k and k in self.ledger.formed else None
            if again:
                self.places |= {group: Place(held, durable=True) for group, held in again.places.items()}
                for group in again.live:
                    self.live[group] = self.books[group]
                    self.books[group].state = "ready"
        self.record(Resumed(0.0, plan.version, plan.k, self.lineage))
        assert (self.ledger.running, self.ledger.rollouts_in_flight) == ({}, 0)
        self.places = {group: held for group, held in self.places.items() if held.durable}
        self.version, self.newest, self.k = plan.version, plan.version, plan.k
        causes = dict.fromkeys(plan.interrupted, "cancelled") | {entry.group: "stale" for entry in plan.evicted}
        for group in plan.requeued:
            self._lose(group, causes[group], requeued=draw.random() < 0.9)
        assert sorted(self.of("ready")) == sorted(plan.kept), "the ledger keeps others than the plan does"
        assert not self.of("running")
        assert not self.ledger.interrupted
        line = line_of(self.lineage, self.parents)
        for group in plan.kept:
            book = self.books[group]
            assert book.tail <= plan.version
            assert book.lineage == line.lineage or book.tail <= line.forks[book.lineage]
        assert plan.ship_again == tuple(range(plan.version, plan.k))
        self.seen.update({"kept": len(plan.kept), "dissolved": len(plan.dissolved), "shipped again": len(plan.ship_again)} | plan.counts)
        for k in plan.ship_again:
            assert max((self.books[group].tail for group in self.kept[k].live), default=0) <= plan.version
            if self.limits.on_stale != "train":
                assert max(self.kept[k].ages, default=0) <= self.limits.max_staleness
