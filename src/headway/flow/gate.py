"""The capacity gate grants leave to start: whole groups for training, single rollouts for evaluation.

It owns nothing but the two queues' turn and the count of evaluation rollouts in flight; everything else it reads from the ledger, so it
cannot drift. A granted group is recorded (and so reserved) before anything is dispatched. The formula is in `rules.admission`.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.events import Admitted, AnyEvent
from headway.flow.watch import Watch
from headway.rules.admission import CapacityReason, GateLimits, capacity, capacity_by_staleness, capacity_reason, free_slots
from headway.rules.scheduling import turn
from headway.types import Admission, Prompt, Purpose


class CapacityGate:
    """Grants admissions by the live sets, max_concurrent and the turn of training and evaluation."""

    def __init__(self, limits: GateLimits, *, watch: Watch, record: Callable[[AnyEvent], None], clock: Callable[[], float]) -> None:
        self._limits = limits
        self._watch = watch
        self._record = record
        self._clock = clock
        self._waiting: dict[Purpose, int] = {"train": 0, "eval": 0}
        self._last: Purpose = "eval"
        self._paused = False
        self.eval_in_flight = 0

    @property
    def capacity(self) -> int:
        """How many groups may start now."""
        return 0 if self._paused else capacity(self._watch.now, self._limits, self.eval_in_flight)

    @property
    def reason(self) -> CapacityReason:
        """Why no group may start, or "open"."""
        reason = capacity_reason(self._watch.now, self._limits, self.eval_in_flight)
        return "paused" if self._paused and reason != "draining" else reason

    def pause(self) -> None:
        """Let no further group start until `resume`; what runs goes on, evaluation too, and a drain ends the wait."""
        self._paused = True

    def resume(self) -> None:
        """Let groups start again."""
        self._paused = False
        self._watch.touch()

    async def admit(self, prompt: Prompt) -> Admission | None:
        """Wait for leave to start a group for this prompt; None once the run drains."""
        ledger = self._watch.now
        await self._turn_of("train")
        if ledger.draining:
            return None
        members = self._limits.group_size
        admission = Admission(ledger.next_group, prompt, members, ledger.version)
        self._record(Admitted(self._clock(), admission.group, prompt.id, prompt.epoch, members, admission.birth))
        return admission

    async def admit_eval(self) -> None:
        """Wait for a free slot for one evaluation rollout and take it; give it back with `release_eval`."""
        await self._turn_of("eval")
        self.eval_in_flight += 1
        self._watch.touch()

    def release_eval(self) -> None:
        """Give back the slot of an evaluation rollout that has ended."""
        self.eval_in_flight -= 1
        self._watch.touch()

    async def _turn_of(self, purpose: Purpose) -> None:
        self._waiting[purpose] += 1
        try:
            while not self._may_go(purpose):
                await self._watch.until(lambda _: self._may_go(purpose))
        finally:
            self._waiting[purpose] -= 1
            self._watch.touch()  # who leaves, cancelled too, may have held slots back for its turn
        self._last = purpose

    def _may_go(self, purpose: Purpose) -> bool:
        ledger = self._watch.now
        if purpose == "train" and ledger.draining:
            return True
        closed = self._paused or ledger.draining or ledger.version < 0
        admissible = not closed and capacity_by_staleness(ledger, self._limits) > 0
        return purpose == turn(
            free=free_slots(ledger, self._limits, self.eval_in_flight),
            group_size=self._limits.group_size,
            train_waits=bool(self._waiting["train"]) and admissible,
            eval_waits=bool(self._waiting["eval"]),
            last=self._last,
        )
