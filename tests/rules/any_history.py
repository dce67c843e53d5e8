"""A run driven through any order of events by a draw (`random.Random`, or hypothesis's own): the real ledger and the real rules."""

from history_books import Book, Kept, Place
from history_crashes import Crashes
from small_world import deadlines_hold, fewest_to_lose

from headway.events import (
    Admitted,
    BatchAcknowledged,
    BatchFormed,
    Finished,
    GroupDropped,
    Ingested,
    PaceChanged,
    PromptDropped,
    Published,
    Ready,
    RolloutDropped,
    SourceExhausted,
)
from headway.rules.admission import capacity, capacity_by_staleness, over_resume_budget, steps_ahead
from headway.rules.batching import can_form, chosen, groups_to_take, in_the_way, may_form
from headway.rules.replay import place


class AnyHistory(Crashes):
    """Each action is a method that takes the draw; `step` lets one of them happen."""

    def step(self, draw):
        """Let one thing happen that may happen now."""
        possible = [action for action in ACTIONS if self.possible(action)]
        (name,) = draw.choices(possible, [ACTIONS[action] for action in possible])
        getattr(self, name)(draw)
        self.check()
        return name

    def admit(self, draw):
        room = capacity(self.ledger, self.limits)
        assert room * self.limits.group_size <= max(0, self.limits.max_concurrent - self.ledger.rollouts_in_flight)
        for _ in range(min(room, draw.choice([1, 3, 20]), self.prompts_left + self.waiting)):
            assert capacity(self.ledger, self.limits) > 0
            assert over_resume_budget(self.ledger, self.limits) == "", "the gate is open, and the second lock is not"
            self._admitted(self.version, self.limits.group_size)
            self._within_resume_budget()
        if not self.prompts_left and not self.ledger.exhausted:
            self.record(SourceExhausted(0.0))

    def _admitted(self, birth, members):
        prompt = next(iter(self.again), f"p{self.ledger.next_group}")
        tries = self.again.pop(prompt, 0)
        if tries:
            self.waiting -= 1
        else:
            self.prompts_left -= 1
        group = self.ledger.next_group
        self.books[group] = self.live[group] = Book(birth, members, prompt, lineage=self.lineage, tries=tries)
        self.admitted.add(group)
        self.record(Admitted(0.0, group, prompt, 0, members, birth))
        return group

    def _within_resume_budget(self):
        """The bound as STALENESS.md has it, where batches take as many as they say."""
        limits = self.limits
        if self.budget is not None and limits.enforce == "admission" and not limits.batch_tokens:
            version, k = self.budget
            room = sum(limits.smallest_batch(j) for j in range(k, version + limits.max_staleness + 1))
            assert len(self.admitted) <= room, "more were admitted after a crash than the bound allows"
            self.seen["admitted after a crash"] += 1

    def end_members(self, draw):
        for _ in range(draw.randint(1, 10)):
            running = [group for group in self.of("running") if self.books[group].ended < self.books[group].members]
            fast = [group for group in running if group % 5]  # some are slow, so that others overtake them
            running = fast if draw.random() < 0.98 else running
            if running:
                self._end(draw.choice(running), draw)

    def _end(self, group, draw):
        book, attempt = self.books[group], draw.randint(0, 2)
        if draw.random() < 0.15:
            self.record(RolloutDropped(0.0, group, 0, attempt, "engine_error", "", 1, final=False))
            return
        book.ended += 1
        if draw.random() < 0.1:
            self.record(RolloutDropped(0.0, group, 0, attempt, "timeout", "", 1, final=True))
            return
        head = draw.randint(min(book.birth, self.version), self.version)
        tail = draw.randint(head, self.version)
        tokens, size = draw.randint(1, 4), draw.randint(0, 3)
        book.tokens, book.size = book.tokens + tokens, book.size + size
        book.stamps += [head, tail]
        book.lineage = self.lineage
        self.record(Finished(0.0, group, 0, attempt, 1.0, tokens, tokens, head, tail, size=size))

    def score(self, draw):
        for group in self.of("running"):
            book = self.books[group]
            if book.ended == book.members and draw.random() < 0.8:
                self._scored(group)

    def _scored(self, group):
        if self.books[group].stamps:
            self.books[group].state = "ready"
            self.record(Ready(0.0, group, zero_advantage=False))
        else:
            self._lose(group, "incomplete")

    def lose_running(self, draw):
        self._lose_one(draw, "running", "incomplete")

    def filter_late(self, draw):
        self._lose_one(draw, "ready", "filtered")

    def _lose_one(self, draw, state, cause):
        groups = self.of(state)
        if groups:
            self._lose(draw.choice(groups), cause, requeued=draw.random() < 0.5)

    def _lose(self, group, cause, *, requeued=False):
        book = self.live.pop(group)
        book.state = "gone"
        self.admitted.discard(group)
        self.failures[book.prompt] += cause == "incomplete"
        self.failed_in_row += cause == "incomplete"
        if requeued and book.prompt not in self.quarantined:
            self.again[book.prompt] = book.tries + 1
            self.waiting += 1
        self.record(GroupDropped(0.0, group, cause, "", 0, requeued))

    def give_up(self, draw):
        """A prompt is never tried again, whether it waits or not."""
        prompt = draw.choice(sorted(prompt for prompt, count in self.failures.items() if count))
        cause = draw.choice(["quarantined", "missing"])
        self.failures[prompt] = 0
        self.waiting -= self.again.pop(prompt, None) is not None
        if cause == "quarantined":
            self.quarantined.add(prompt)
        self.record(PromptDropped(0.0, prompt, 0, cause, ""))
        self.seen[cause] += 1

    def train(self, draw):
        if self.newest < self.k:
            self.newest = draw.randint(self.newest + 1, self.k)
            self.record(BatchAcknowledged(0.0, self.newest - 1))

    def publish(self, draw):
        """A fleet may jump over versions, lag behind, or say again what it serves."""
        offered = draw.randint(max(0, self.version - 1), max(self.version, self.newest - self.lag))
        self._published(offered)

    def _published(self, version):
        if self.budget is not None and version > self.budget[0]:
            self.budget = None
        self.version = max(self.version, version)
        self.record(Published(0.0, version, ("engine",)))

    def change_pace(self, draw):
        self.record(PaceChanged(0.0, draw.randint(self.lag * 2, 12) / 2, 1.0, 1.0))
        assert steps_ahead(self.ledger, self.limits) <= self.limits.max_staleness

    def take_place(self, draw):
        for _ in range(draw.randint(1, 3)):
            j = place(self.ledger, self.limits)
            if j is None or not self.limits.replayed_groups:
                return
            group = self.ledger.next_group
            self.places[group] = Place(j)
            self.record(Ingested(0.0, group, f"theirs {group}", "external", 1, j))
            assert sum(held.k == j for held in self.places.values()) <= self.limits.replayed_groups
            assert capacity_by_staleness(self.ledger, self.limits) >= 0, "a place undid an admission"
            self.check()

    def fill_places(self, draw):
        for group, held in list(self.places.items()):
            fate = draw.random()
            if fate < 0.2:
                del self.places[group]
                self.record(GroupDropped(0.0, group, "incomplete", "", 0))
            elif fate < 0.8 and not held.durable:
                held.durable = True
                self.sizes[group] = draw.randint(0, 3)
                self.record(Finished(0.0, group, 0, 0, 1.0, 1, 1, -1, -1, size=self.sizes[group]), Ready(0.0, group, zero_advantage=False))

    def form(self, draw):
        for _ in range(draw.randint(1, 3)):
            if not self.form_one():
                return

    def form_one(self):
        limits, ledger, k = self.limits, self.ledger, self.k
        if not may_form(ledger, limits.max_lead):
            assert k - self.newest > limits.max_lead
            return False
        self._drop_stale()
        n = groups_to_take(ledger, limits)
        if limits.on_stale == "wait" and n >= 0:
            assert can_form(ledger, limits) == deadlines_hold(self._others(n), k + 1, limits.max_staleness, self._room)
        if not can_form(ledger, limits):
            return False
        if limits.on_stale == "drop" and limits.enforce == "admission":
            gone = in_the_way(ledger, limits, n)
            assert len(gone) == max(0, fewest_to_lose(self._others(n), k + 1, limits.max_staleness, self._room))
            for group in gone:
                assert self.books[group].state == "running"
                self._lose(group, "stale", requeued=True)
                self.seen["dropped for a batch"] += 1
        self._formed(chosen(ledger, n))
        return True

    def _drop_stale(self):
        limits = self.limits
        oldest = self.k - limits.max_staleness
        if limits.on_stale == "mask":
            for group in self.of("ready"):
                if self.books[group].tail < oldest:
                    self._lose(group, "stale", requeued=True)
                    self.seen["all masked"] += 1
        elif limits.on_stale == "drop" and limits.enforce == "ship":
            over = in_the_way(self.ledger, limits, 0)
            assert sorted(over) == sorted(group for group in self.of("running", "ready") if self.books[group].birth < oldest)
            for group in over:
                self._lose(group, "stale", requeued=True)
                self.seen["over age"] += 1

    def _others(self, n):
        """Return the births of live groups without the n oldest ready ones."""
        ready = sorted(self.books[group].birth for group in self.of("ready"))
        return ready[n:] + [self.books[group].birth for group in self.of("running")]

    def _formed(self, groups):
        k, limits = self.k, self.limits
        live = [group for group in groups if group in self.books]
        places = [group for group in groups if group in self.places]
        last_of_all = self.ledger.exhausted and not self.waiting and not self.of("running") and len(live) == len(self.of("ready"))
        assert {group for group, held in self.places.items() if held.durable and (held.k == k or last_of_all)} == set(places)
        assert len(groups) >= limits.groups_per_batch or (self.ledger.exhausted and not self.of("running")), "a batch is too small"
        if limits.batch_tokens and len(live) > self._room(k):
            assert sum(self.books[group].tokens for group in live) <= limits.batch_tokens, "a batch is over its budget"
        newest = [self.books[group].tail if limits.on_stale == "mask" else self.books[group].birth for group in live]
        ages = [k - version for version in newest]
        if limits.on_stale != "train":
            assert max(ages, default=0) <= limits.max_staleness, "something over the bound is in the batch"
        for group in live:
            self.live.pop(group).state = "batched"
        self.kept[k] = Kept(self.lineage, live, {group: self.places.pop(group).k for group in places}, ages)
        self.record(BatchFormed(0.0, k, tuple(groups), 0.0))
        self.k = k + 1
        self.seen["batches"] += 1
        self.seen["replayed"] += len(places)
        self.seen["tails"] += len(groups) < limits.groups_per_batch
        if ages:
            self.seen["most stale"] = max(self.seen["most stale"], *ages)

    def finish_all(self, draw):
        """Whatever ran has ended: then something forms, or something may start, once training and publication have caught up."""
        for group in self.of("running"):
            while self.books[group].ended < self.books[group].members:
                self._end(group, draw)
            self._scored(group)
        for group, held in list(self.places.items()):
            if not held.durable:
                del self.places[group]
                self.record(GroupDropped(0.0, group, "incomplete", "", 0))
        if self.newest < self.k:
            self.newest = self.k
            self.record(BatchAcknowledged(0.0, self.k - 1))
        if self.newest - self.lag > self.version:
            self._published(self.newest - self.lag)
        self.check()
        before = self.k
        while self.form_one():
            self.newest = self.k
            self.record(BatchAcknowledged(0.0, self.k - 1))
        self.seen["batches when all had ended"] += self.k - before

    def possible(self, action):
        """Whether an action would do anything."""
        limits, ledger = self.limits, self.ledger
        match action:
            case "admit":
                return capacity(ledger, limits) > 0 and self.prompts_left + self.waiting > 0
            case "end_members":
                return ledger.rollouts_in_flight > 0
            case "score":
                return any(self.books[group].ended == self.books[group].members for group in ledger.running)
            case "form":
                return may_form(ledger, limits.max_lead) and can_form(ledger, limits)
            case "train":
                return self.newest < self.k
            case "publish":
                return self.newest - self.lag > self.version
            case "take_place":
                return limits.replayed_groups > 0 and place(ledger, limits) is not None
            case "fill_places":
                return any(not held.durable for held in self.places.values())
            case "lose_running":
                return bool(ledger.running)
            case "filter_late":
                return bool(ledger.ready)
            case "give_up":
                return any(self.failures.values())
        return True


ACTIONS = {
    "admit": 8,
    "end_members": 8,
    "score": 6,
    "form": 6,
    "train": 5,
    "publish": 4,
    "take_place": 2,
    "fill_places": 2,
    "lose_running": 0.4,
    "filter_late": 0.4,
    "give_up": 0.2,
    "change_pace": 0.1,
    "finish_all": 0.15,
    "crash": 0.06,
}
