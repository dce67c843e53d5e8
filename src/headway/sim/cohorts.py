"""The cohort stepper: the rules of admission and forming in numpy, one vector step per batch, for fleets and sweeps.

It holds where rollouts have a speed of their own and nothing fails: a unit's end is known when it starts, and between two publications
nothing changes but what has ended. `step(scenario)` says what the virtual loop says of the same scenario: exactly where nothing is drawn
(unless a rollout ends in the very instant in which a sync begins), within 2 % otherwise (its draws are others). What it has no vector step
for it refuses (`NotForCohorts`), and says why.

Ends are kept on the *generation clock*, which stands still while weights are synced; a batch is formed at an `np.partition` of them. Where
max_concurrent binds, the starts of what waits are worked out ahead with a heap, and again when a version comes or units are cancelled.
"""

from __future__ import annotations

import math

import numpy as np

from headway.rules.admission import GateLimits, limits_of, taken_until
from headway.settings import steps_ahead
from headway.sim.cohort_draws import Lengths, queued_starts, training_times
from headway.sim.cohort_figures import CohortBooks, Formed, Mark, Published
from headway.sim.cohort_scope import NotForCohorts, Policy, refusal
from headway.sim.cohort_stale import Overbooked, in_the_way, overbooked
from headway.sim.cohort_units import NONE, ROUNDING, Ints, Units
from headway.sim.cohort_waits import Closed
from headway.sim.intervals import TRAINER
from headway.sim.scenario import Scenario, drawn, tokens_of
from headway.sim.summary import Summary

_NEVER = 10**9  # the last batches of a run that ends wait for the longest rollouts: figures are of runs that go on


def step(scenario: Scenario, *, policy: Policy = "headway") -> Summary:
    """Step through a scenario and return its figures; raises NotForCohorts."""
    if reason := refusal(scenario, policy):
        raise NotForCohorts(f"the cohort stepper cannot do this scenario: {reason}")
    return _Cohorts(scenario, policy).to_the_end()


class _Cohorts:
    """A run under way."""

    def __init__(self, scenario: Scenario, policy: Policy) -> None:
        rollout, run = scenario.rollout, scenario.run
        self._limits: GateLimits = limits_of(rollout, _NEVER)
        self._ahead = min(steps_ahead(rollout), float(rollout.max_staleness))
        self._size, self._members = rollout.groups_per_batch, rollout.group_size
        self._bound, self._mode, self._policy = rollout.max_staleness, rollout.on_stale, policy
        self._speed = scenario.fleet.tokens_per_second
        self._last = run.steps
        lengths, trainer, syncs = np.random.default_rng(run.seed).spawn(3)
        self._lengths = Lengths(tokens_of(scenario), self._members, self._speed, lengths, least=scenario.workload.turns)
        self._training = training_times(drawn(scenario.training.seconds), scenario.training.jitter, run.steps, trainer)
        self._pauses = drawn(scenario.fleet.sync_seconds).draw(syncs, run.steps + 1)
        self._units = Units(self._members, self._speed)
        self._now = self._generated = self._offset = 0.0  # the wall clock, the generation clock, and what that lags behind
        self._sync_began, self._sync_ends = 0.0, math.inf
        self._version = self._next = self._trained = self._target = 0
        self._done_at: list[float] = []  # of batch k, wall clock
        self._ready_at: float | None = None  # on the generation clock: when the next batch has its units; None: to be worked out
        self._spent = self._idle = self._held = self._busy_until = 0.0  # see `_mark`; when the last that was admitted ends
        self._books = CohortBooks(scenario, masks=self._mode == "mask" and policy == "headway")
        self._closed = Closed(self._books)

    def to_the_end(self) -> Summary:
        """Form and train every batch."""
        self._books.published(Published(0.0, 0.0, 0))
        self._admit(0)
        while self._trained < self._last:
            trained = self._done_at[self._trained] if self._trained < self._next else math.inf
            other = min(trained, self._sync_ends)
            self._go_to(min(other, self._form_at(other)))
            if self._now == self._sync_ends < math.inf:
                self._publish()
            elif self._now == trained < math.inf:
                self._trained += 1
                if self._books.begins_with(self._trained - 1):
                    self._books.marked(self._mark(), begins=True)
                    self._note_waiting(self._units.ended(self._generated))
                self._begin_sync()
            elif self._now < math.inf:
                self._form()
            else:
                raise NotForCohorts("no batch can be formed any more: nothing runs, and the gate is closed")
        self._books.marked(self._mark(), begins=False)
        self._closed.note(self._now, self._generated)
        return self._books.summary()

    # the clock, and the weights

    def _go_to(self, wall: float) -> None:
        self._now = wall
        self._generated = (wall if self._sync_ends == math.inf else self._sync_began) - self._offset

    def _begin_sync(self) -> None:
        if self._sync_ends == math.inf and self._trained > self._version:
            self._target, self._sync_began = self._trained, self._now
            self._sync_ends = self._now + float(self._pauses[self._target])

    def _mark(self) -> Mark:
        now = self._generated
        return Mark(self._spent + self._units.seconds(now), self._idle + max(0.0, now - self._busy_until), self._held)

    def _publish(self) -> None:
        paused, now = self._now - self._sync_began, self._generated
        running = self._units.count_in_flight(now)
        self._held += paused * running
        self._offset += paused
        self._sync_ends = math.inf
        self._version = self._target
        self._books.published(Published(now, self._now, self._version), paused=paused)
        self._admit(running)
        self._begin_sync()

    # admission

    def _admit(self, running: int) -> None:
        """Start what the gate lets start now, beside those that run; where max_concurrent binds, work out when the rest will."""
        now, members, units = self._generated, self._members, self._units
        self._closed.note(self._now, now)
        if (started := units.started(now)) < len(units):  # the others wait for slots: how that goes was worked out before, and may change
            units.cut(started)
            self._ready_at = None
        count = taken_until(self._limits, self._next, self._version, self._ahead, {}) - len(units)
        if count <= 0:
            return
        tokens, seconds = self._lengths.take(count)
        room = (self._limits.max_concurrent - running) // members
        if room < count:
            starts = queued_starts(units.in_flight(now), tokens / self._speed, now, self._limits.max_concurrent)
        else:
            starts = np.empty(count)
            starts.fill(now)
        self._closed.queued(starts.item(-1))
        self._idle += max(0.0, now - self._busy_until)
        self._busy_until = max(self._busy_until, units.add(starts, tokens, seconds))
        if self._mode == "wait" or (self._ready_at is not None and self._ready_at > now):  # else those that have ended are enough
            self._ready_at = None
        self._books.in_flight(self._now, running + min(room, count) * members)

    # forming

    def _form_at(self, before: float) -> float:
        """Return when the next batch is formed, as things stand (wall clock); infinite, if that is not `before` something else happens."""
        k = self._next
        if k >= self._last or k - 1 - self._limits.max_lead >= self._trained:
            return math.inf
        if self._ready_at is None:
            if self._units.count_ended(before - self._offset) < self._size:  # cheaper than to tell when
                return math.inf
            self._ready_at = self._units_ready_at()
        if self._ready_at <= self._generated + ROUNDING:
            return self._now
        return self._ready_at + self._offset if self._sync_ends == math.inf else math.inf  # first the sync must end

    def _units_ready_at(self) -> float:
        """Return when the live units fill the next batch, on the generation clock; infinite: there are too few."""
        ready = self._units.ends_of(self._size)
        if self._mode == "wait" and ready < math.inf:
            for due, needed in self._overbooked():
                ready = max(ready, self._units.ends_of(needed, due))
        return ready

    def _overbooked(self) -> Overbooked:
        return overbooked(self._units, self._limits, self._books.served_since, self._next, self._version)

    def _form(self) -> None:
        k, units = self._next, self._units
        ended = units.ended(self._generated)
        if self._sorts_out(ended):
            return
        chosen = ended[: self._size]
        if self._policy == "completion_order":
            chosen = np.sort(np.argpartition(units.ends, self._size - 1)[: self._size])
        seconds = float(self._training[k])
        free = self._done_at[-1] if self._done_at else 0.0
        if free < self._now:
            self._note_wait(free)
        done = max(self._now, free) + seconds
        batch = Formed(k, done, seconds, units.starts.take(chosen), units.tokens.take(chosen, axis=0))
        tokens = float(batch.tokens.sum())
        if self._members == 1 and len(ended) == self._size:
            self._books.waiting(self._now, groups=self._size, rollouts=self._size, tokens=tokens)
        else:
            self._note_waiting(ended)
        self._books.formed(batch)
        self._spent += tokens / self._speed
        cancelled = in_the_way(units, self._generated, self._overbooked(), ended, chosen) if self._mode == "drop" else NONE
        self._done_at.append(done)
        self._next += 1
        self._drop(cancelled, but=chosen)

    def _note_waiting(self, ended: Ints) -> None:
        """Tell the books what has ended and is in no batch."""
        tokens = self._units.tokens
        written = tokens.take(ended) if self._members == 1 else tokens[self._units.ended_members(self._generated)]
        self._books.waiting(self._now, groups=len(ended), rollouts=len(written), tokens=float(written.sum()))

    def _note_wait(self, free: float) -> None:
        """Tell the books why the trainer has waited until now: what kept the batch from being full, and then what from being formed."""
        full = self._now
        if self._mode == "wait":
            full = min(full, max(free, self._books.wall_of(self._units.ends_of(self._size))))
            self._books.waited(full, self._now, TRAINER["groups in flight that would grow too old"])
        self._closed.waited(free, full, self._now, self._generated)

    def _sorts_out(self, ended: Ints) -> bool:
        """Drop what is too old for the next batch; whether there was anything, and other units must take its place."""
        stale = NONE
        since = self._books.served_since(self._next - self._bound)
        if self._policy == "gate_and_sweep":
            stale = np.arange(int(np.searchsorted(self._units.starts, since - ROUNDING)))
        elif self._policy == "headway" and self._mode == "mask":
            stale = self._units.older_than(since, ended)
        if not len(stale):
            return False
        self._drop(stale)
        return True

    def _drop(self, units: Ints, *, but: Ints = NONE) -> None:
        """Drop units as too old: their places are free at once. `but`: others that leave, into a batch."""
        gone = np.zeros(len(self._units), np.bool_)
        gone[but] = True
        if len(units):
            now = self._generated
            finished = self._units.finished(now, units)
            self._spent += self._units.seconds(now, units)
            self._books.lost(self._now, "stale", finished)
            self._books.lost(self._now, "undelivered", float(self._units.written(now, units).sum()) - finished)
            gone[units] = True
        self._units.keep((~gone).nonzero()[0])
        self._ready_at = None
        if len(units):
            self._admit(self._units.count_in_flight(self._generated))
