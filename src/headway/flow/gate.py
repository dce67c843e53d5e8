"""The capacity gate grants leave to start (whole groups for training, single rollouts for evaluation), and places for replayed groups.

It owns nothing but whose turn it is and the count of evaluation rollouts in flight; everything else it reads from the ledger, so it cannot
drift. What is granted is recorded (and so reserved) before anything is dispatched. Formulas: `rules.admission`, `rules.replay`.

Neither side starves: while replayed groups wait and there is a place, live groups leave it to them; and of a batch they may take no more
than `replayed_groups`, which the user sets (all of it, if so asked). Files and HTTP take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headway.errors import BoundBreached
from headway.events import Admitted, AnyEvent, Ingested
from headway.flow.watch import Watch
from headway.rules.admission import (
    CapacityReason,
    GateLimits,
    capacity,
    capacity_by_staleness,
    capacity_reason,
    free_slots,
    over_resume_budget,
)
from headway.rules.replay import place, reserved
from headway.rules.scheduling import turn
from headway.rules.view import LedgerView
from headway.types import Admission, Prompt, Purpose, Source


class CapacityGate:
    """Grants admissions by the live sets, max_concurrent and the turn of training, evaluation and replay."""

    def __init__(self, limits: GateLimits, *, watch: Watch, record: Callable[[AnyEvent], None], clock: Callable[[], float]) -> None:
        self._limits = limits
        self._watch = watch
        self._record = record
        self._clock = clock
        self._waiting: dict[Purpose, int] = {"train": 0, "eval": 0}
        self._last: Purpose = "eval"
        self._offering: dict[Source, int] = {"replay": 0, "external": 0}
        self._last_source: Source = "external"
        self._has_place = {source: partial(self._ends_the_wait, source) for source in self._offering}  # one for all who wait
        self._paused = False
        self._short_of_space = False
        self.eval_in_flight = 0

    @property
    def capacity(self) -> int:
        """How many live groups may start now."""
        if self._closed:
            return 0
        now, limits = self._watch.now, self._limits
        return max(0, min(capacity(now, limits, self.eval_in_flight), capacity_by_staleness(now, limits) - self._left_to_replay()))

    @property
    def reason(self) -> CapacityReason:
        """Why no live group may start, or "open"."""
        reason = capacity_reason(self._watch.now, self._limits, self.eval_in_flight)
        if self._closed and reason != "draining":
            return "paused" if self._paused else "disk"
        return "replay's turn" if reason == "open" and not self._leaves_room else reason

    def pause(self) -> None:
        """Let no further group start until `resume`; what runs goes on, evaluation too, and a drain ends the wait."""
        self._paused = True

    def resume(self) -> None:
        """Let groups start again."""
        self._paused = False
        self._watch.touch()

    def heed_space(self, short: bool) -> None:  # noqa: FBT001 - the whole message
        """Let no further group start while disk space is short; what runs goes on, and a drain ends the wait."""
        self._short_of_space = short
        self._watch.touch()

    @property
    def _closed(self) -> bool:
        return self._paused or self._short_of_space

    async def admit(self, prompt: Prompt) -> Admission | None:
        """Wait for leave to start a group for this prompt; None once the run drains. Raises BoundBreached rather than break the bound."""
        ledger = self._watch.now
        await self._turn_of("train")
        if ledger.draining:
            return None
        if broken := over_resume_budget(ledger, self._limits):
            raise BoundBreached(f"another group would start, against the bound on a resumed run: {broken}")
        members = self._limits.group_size
        admission = Admission(ledger.next_group, prompt, members, ledger.version)
        self._record(Admitted(self._clock(), admission.group, prompt.id, prompt.epoch, members, admission.birth))
        return admission

    async def admit_eval(self) -> None:
        """Wait for a free slot for one evaluation rollout and take it; give it back with `release_eval`."""
        await self._turn_of("eval")
        self.eval_in_flight += 1
        self._watch.touch(only_slots=True)

    def release_eval(self) -> None:
        """Give back the slot of an evaluation rollout that has ended."""
        self.eval_in_flight -= 1
        self._watch.touch(only_slots=True)

    async def admit_replayed(self, name: str, source: Source, members: int) -> Ingested | None:
        """Wait for a place in a batch for a group that is not live, and take it; None once the run drains.

        The place is held from here on: the group's rollouts must become durable, or the group be dropped.
        """
        self._offering[source] += 1
        try:
            while (placed := self.try_admit_replayed(name, source, members)) is None and not self._watch.now.draining:
                await self._watch.until(self._has_place[source])
            return placed
        finally:
            self._offering[source] -= 1
            self._watch.touch()  # places may have been kept for whoever leaves

    def try_admit_replayed(self, name: str, source: Source, members: int) -> Ingested | None:
        """Take a place for a group that is not live, as `admit_replayed`, if there is one right now."""
        k = self._place(source)
        if k is None:
            return None
        placed = Ingested(self._clock(), self._watch.now.next_group, name, source, members, k)
        self._record(placed)
        self._last_source = source
        return placed

    def _ends_the_wait(self, source: Source, now: LedgerView) -> bool:
        return bool(now.draining) or self._place(source) is not None

    def _place(self, source: Source) -> int | None:
        """Return the batch in which a group of this source may have a place now."""
        others_wait = any(count for other, count in self._offering.items() if other != source)
        if self._closed or (others_wait and self._last_source == source):
            return None
        return place(self._watch.now, self._limits)

    def _left_to_replay(self) -> int:
        """Return how many groups' worth of capacity is kept free for replayed groups that could take it now."""
        return reserved(self._watch.now, self._limits, sum(self._offering.values()))

    async def _turn_of(self, purpose: Purpose) -> None:
        self._waiting[purpose] += 1
        try:
            while await self._watch.until(lambda _: self._may_go(purpose), slots=True):
                pass  # somebody else may have gone since
        finally:
            self._waiting[purpose] -= 1
            self._watch.touch(only_slots=True)  # who leaves, cancelled too, may have held slots back for its turn
        self._last = purpose

    def _may_go(self, purpose: Purpose) -> bool:
        ledger = self._watch.now
        if purpose == "train" and ledger.draining:
            return True
        free, members = free_slots(ledger, self._limits, self.eval_in_flight), self._limits.group_size
        if free < (members if purpose == "train" else 1):
            return False  # whoever's turn it is: this is what a check finds most often, and costs least
        closed = self._closed or ledger.draining or ledger.version < 0
        return purpose == turn(
            free=free,
            group_size=members,
            train_waits=self._waiting["train"] > 0 and not closed and self._leaves_room,
            eval_waits=self._waiting["eval"] > 0,
            last=self._last,
        )

    @property
    def _leaves_room(self) -> bool:
        """Whether staleness, and what is kept for replayed groups, leave room for a live group."""
        room = capacity_by_staleness(self._watch.now, self._limits)
        return room > 0 and room > self._left_to_replay()
