"""A group that lost too many members is dropped here, and nowhere else: what becomes of its prompt is `rules.quarantine`'s to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headway.events import AnyEvent, GroupDropped, PromptDropped
from headway.flow.watch import Watch
from headway.rules.quarantine import verdict
from headway.types import Admission, Cause, Prompt, Rollout


class DropFailed(Protocol):
    """Drops a group that lost too many members."""

    def __call__(self, admission: Admission, rollouts: Sequence[Rollout], lost: Sequence[Cause], detail: str) -> None:
        """Record the drop, and what becomes of the prompt."""
        ...


class FailedGroups:
    """Drops incomplete groups: tries their prompts again, or quarantines them."""

    def __init__(
        self,
        *,
        watch: Watch,
        record: Callable[[AnyEvent], None],
        requeue: Callable[[Prompt], None],
        max_prompt_failures: int,
        clock: Callable[[], float],
    ) -> None:
        self._watch = watch
        self._record = record
        self._requeue = requeue
        self._max_prompt_failures = max_prompt_failures
        self._clock = clock

    def drop(self, admission: Admission, rollouts: Sequence[Rollout], lost: Sequence[Cause], detail: str) -> None:
        """Drop a live group; `rollouts`: its members that finished, `lost`: causes of those that are lost, in order."""
        prompt, ledger = admission.prompt, self._watch.now
        failures = ledger.failures.get(prompt.id, 0)
        judged = verdict(
            failures=failures,
            failed_in_row=ledger.failed_in_row,
            lost=lost,
            members=admission.members,
            max_prompt_failures=self._max_prompt_failures,
        )
        sampled = sum(rollout.sampled_tokens for rollout in rollouts)
        self._record(GroupDropped(self._clock(), admission.group, judged.cause, detail, sampled, judged.requeued))
        if judged.quarantined:
            self._record(PromptDropped(self._clock(), prompt.id, prompt.epoch, "quarantined", judged.quarantined, failures + 1))
        if judged.requeued:
            self._requeue(prompt)
