"""The mission document's model and its figures, exactly; then the same streams under headway's own ledger and rules.

The model: a fleet that serves one version, `concurrent` groups at most, and a clock of ticks. In a tick, groups are admitted while there is
capacity (each draws its latency from one numpy stream, or has the one latency), then a tick passes, what has run its time is complete, and
batches of B are trained at once, each making the next version. Ages are versions between a group's birth and its batch.
"""

from collections import deque

import numpy as np
import pytest

from headway.events import Admitted, BatchAcknowledged, BatchFormed, Finished, GroupDropped, Published, Ready, Resumed
from headway.rules.admission import GateLimits, capacity
from headway.rules.batching import can_form, chosen, groups_to_take, in_the_way
from headway.rules.counter import counter_capacity, pending_limit
from headway.rules.ledger import Ledger, apply
from headway.rules.staleness import oldest_contributing

B = 8
UNIFORM, JITTERED = (3, 3), (1, 6)
UNBOUNDED = 10**9
AMPLE = 10**6


def latencies(latency, seed=0):
    """Yield ticks; numpy's stream with seed 0, its upper end exclusive."""
    low, high = latency
    stream = np.random.default_rng(seed)
    while True:
        yield int(stream.integers(low, high)) if high > low else low


def by_counter(max_staleness, *, ticks=60, concurrent=64, latency=UNIFORM, version=0, accepted=0):
    """Play the mission document's model; return the ages of what was trained, and the admissions of each tick."""
    drawn = latencies(latency)
    due = deque()  # (birth, tick at whose end it is complete), in the order of admission
    complete, ages, admissions = deque(), [], []

    def room():
        return counter_capacity(
            max_concurrent=concurrent,
            running=len(due),
            accepted=accepted,
            version=version,
            max_staleness=max_staleness,
            groups_per_batch=B,
        )

    for tick in range(ticks):
        admissions.append(0)
        while room() > 0:
            due.append((version, tick + next(drawn) - 1))
            admissions[-1] += 1
        complete.extend(birth for birth, last in due if last <= tick)
        accepted += sum(last <= tick for _, last in due)
        due = deque(entry for entry in due if entry[1] > tick)
        while len(complete) >= B:
            ages += [version - complete.popleft() for _ in range(B)]
            version += 1
    return ages, admissions


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_with_uniform_latency_the_counter_is_exact_and_the_bound_is_reached(bound):
    assert max(by_counter(bound)[0]) == bound


@pytest.mark.parametrize(("bound", "oldest"), [(1, 2), (2, 4), (4, 7)])
def test_with_uneven_latencies_admission_alone_overshoots(bound, oldest):
    ages, _ = by_counter(bound, latency=JITTERED)
    assert max(ages) == oldest
    assert abs(sum(ages) / len(ages) - bound) < 1


def test_the_overshoot_grows_with_the_spread():
    assert max(by_counter(2, latency=(1, 3))[0]) < max(by_counter(2, latency=(1, 12))[0])


@pytest.mark.parametrize(("concurrent", "oldest"), [(16, 1), (32, 3), (64, 7), (128, 15), (256, 31)])
def test_without_the_gate_concurrency_sets_the_age(concurrent, oldest):
    assert max(by_counter(UNBOUNDED, ticks=80, concurrent=concurrent)[0]) == oldest
    assert max(by_counter(2, ticks=80, concurrent=concurrent)[0]) == min(2, concurrent // B - 1)


def test_a_resume_with_a_zeroed_counter_admits_a_burst_and_never_finds_its_bound_again():
    lost, lost_admissions = by_counter(2, concurrent=AMPLE, version=40)
    right, right_admissions = by_counter(2, concurrent=AMPLE, version=40, accepted=40 * B)
    assert (lost_admissions[0], right_admissions[0]) == (344, 24)
    assert (max(lost), max(right)) == (42, 2)


def test_concurrency_clips_the_burst_and_not_the_age():
    ages, admissions = by_counter(2, concurrent=64, version=40)
    assert (admissions[0], max(ages)) == (64, 7)


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_the_pending_limit_is_a_batch_per_version_of_slack_and_one(bound):
    limit = pending_limit(max_staleness=bound, groups_per_batch=B)
    fresh = {"running": 0, "accepted": 0, "version": 0, "max_staleness": bound, "groups_per_batch": B}
    assert limit == (bound + 1) * B == counter_capacity(max_concurrent=AMPLE, **fresh)
    assert counter_capacity(max_concurrent=3, **fresh) == 3


class Headway:
    """The same ticks, decided by the ledger and the rules; every token is stamped with its group's birth."""

    def __init__(self, mode, bound, *, concurrent=64, latency=UNIFORM, version=0, enforce="admission"):
        self.limits = GateLimits(
            groups_per_batch=B,
            group_size=1,
            max_concurrent=concurrent,
            steps_ahead=float(bound),
            steps=UNBOUNDED,
            max_staleness=bound,
            on_stale=mode,
            enforce=enforce,
        )
        self.ledger = Ledger()
        apply(self.ledger, Resumed(0.0, version, version, "line") if version else Published(0.0, 0, ("engine",)))
        self.due = {}  # group -> tick at whose end it is complete
        self.drawn = latencies(latency)
        self.ages = []
        self.admissions = []
        self.lost = 0

    def play(self, ticks=60):
        for tick in range(ticks):
            self.admissions.append(0)
            while capacity(self.ledger, self.limits) > 0:
                group = self.ledger.next_group
                apply(self.ledger, Admitted(0.0, group, f"p{group}", 0, 1, self.ledger.version))
                self.due[group] = tick + next(self.drawn) - 1
                self.admissions[-1] += 1
            for group in [group for group, last in self.due.items() if last <= tick]:
                del self.due[group]
                apply(self.ledger, Finished(0.0, group, 0, 0, 1.0, 2, 1, 0, 0))
                apply(self.ledger, Ready(0.0, group, zero_advantage=False))
            while self._form():
                pass
            assert self.due or capacity(self.ledger, self.limits) > 0, "deadlock: nothing runs, nothing forms, nothing may start"
        return self

    def _form(self):
        ledger, k = self.ledger, self.ledger.next_batch
        oldest = oldest_contributing(k, self.limits.max_staleness)
        if self.limits.on_stale == "mask":
            for group in [group for group, unit in ledger.ready.items() if unit.birth < oldest]:
                self._drop(group)
        if not can_form(ledger, self.limits):
            return False
        if self.limits.on_stale == "drop":
            for group in in_the_way(ledger, self.limits, groups_to_take(ledger, self.limits)):
                self._drop(group)
            if not can_form(ledger, self.limits):
                return False
        groups = chosen(ledger, groups_to_take(ledger, self.limits))
        self.ages += [k - ledger.ready[group].birth for group in groups]
        apply(ledger, BatchFormed(0.0, k, tuple(groups), 0.0))
        apply(ledger, BatchAcknowledged(0.0, k))
        apply(ledger, Published(0.0, k + 1, ("engine",)))
        return True

    def _drop(self, group):
        self.lost += 1
        self.due.pop(group, None)
        apply(self.ledger, GroupDropped(0.0, group, "stale", "", 0, requeued=True))


MODES = [
    ("mask", "admission"),
    ("wait", "admission"),
    ("drop", "admission"),
    ("mask", "ship"),
    ("drop", "ship"),
]


@pytest.mark.parametrize(("mode", "enforce"), MODES)
@pytest.mark.parametrize("bound", [0, 1, 2, 4])
@pytest.mark.parametrize("latency", [UNIFORM, JITTERED, (1, 40)])
@pytest.mark.parametrize("concurrent", [16, 64])
def test_no_mode_of_headway_trains_on_anything_over_the_bound(mode, enforce, bound, latency, concurrent):
    played = Headway(mode, bound, latency=latency, concurrent=concurrent, enforce=enforce).play(100)
    assert played.ledger.next_batch > 100 / (2 * latency[1])
    assert len(played.ages) == played.ledger.next_batch * B
    assert max(played.ages) <= bound
    if mode == "wait":
        assert played.lost == 0


@pytest.mark.parametrize("mode", ["mask", "wait", "drop"])
@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_with_uniform_latency_every_mode_reaches_the_bound_and_loses_nothing(mode, bound):
    played = Headway(mode, bound).play()
    counter_ages, counter_admissions = by_counter(bound)
    assert (played.ages, played.admissions, played.lost) == (counter_ages, counter_admissions, 0)
    assert max(played.ages) == bound


@pytest.mark.parametrize("mode", ["mask", "wait", "drop"])
@pytest.mark.parametrize("version", [0, 40, 50, 500])
@pytest.mark.parametrize("concurrent", [64, AMPLE])
@pytest.mark.parametrize("latency", [UNIFORM, JITTERED])
def test_a_resume_of_headway_admits_a_window_and_no_burst(mode, version, concurrent, latency):
    """There is no counter to zero: a restored version opens the same window as version 0."""
    played = Headway(mode, 2, concurrent=concurrent, version=version, latency=latency).play()
    assert played.admissions[0] == 24
    assert max(played.ages) <= 2
