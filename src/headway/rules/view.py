"""What decisions read: the live groups and the ledger, read only.

`rules.ledger` folds events into it; everyone but the recorder sees no more than this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec


class Unit(msgspec.Struct):
    """A live group: `ended` of its `members` rollouts have ended, `birth` is the version served at its admission.

    `tokens` (all positions), `sampled_tokens` and `size` (payload bytes) are those of its finished members; `admitted` is Unix seconds;
    `tries`: how often its prompt was tried before in this epoch.
    """

    prompt_id: str
    epoch: int
    birth: int
    members: int
    ended: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    size: int = 0
    admitted: float = 0.0
    tries: int = 0


@dataclass(slots=True)
class Promise:
    """A place in batch `k` that a replayed or external group holds; `ready`: its rollouts are durable, `size`: bytes of their payloads."""

    k: int
    ready: bool = False
    size: int = 0


@dataclass(slots=True)
class ResumeBudget:
    """The run was taken up at version `version` with batch `k` next; `admitted`: groups admitted since, less those dropped of them.

    `taken`: live groups that batches have taken since.
    """

    version: int
    k: int
    first_group: int
    admitted: int = 0
    taken: int = 0


class FormedView(Protocol):
    """The groups of a batch that was formed: live ones, and those that held a place in it."""

    @property
    def units(self) -> Mapping[int, Unit]:
        """Live groups, as they were."""
        ...

    @property
    def promised(self) -> Mapping[int, Promise]:
        """Replayed and external groups, with the place that each held."""
        ...


class LedgerView(Protocol):
    """What everyone but the recorder sees: the ledger, read only."""

    @property
    def version(self) -> int:
        """v: the version that every serving engine serves; -1 before the first publication."""
        ...

    @property
    def next_batch(self) -> int:
        """k: the batch that will be formed next."""
        ...

    @property
    def trained(self) -> int:
        """The newest version that the trainer has completed."""
        ...

    @property
    def running(self) -> Mapping[int, Unit]:
        """Groups in flight, by id: admitted and not yet scored."""
        ...

    @property
    def ready(self) -> Mapping[int, Unit]:
        """Complete, scored groups that no batch has taken."""
        ...

    @property
    def births(self) -> Mapping[int, int]:
        """Live groups (running and ready) by birth; no entry is 0."""
        ...

    @property
    def ready_births(self) -> Mapping[int, int]:
        """Ready groups by birth; no entry is 0."""
        ...

    @property
    def ready_tokens(self) -> int:
        """Token positions of ready groups."""
        ...

    @property
    def ready_size(self) -> int:
        """Payload bytes of ready groups."""
        ...

    @property
    def ingested(self) -> Mapping[int, Promise]:
        """Replayed and external groups that no batch has taken, by id."""
        ...

    @property
    def promised(self) -> Mapping[int, int]:
        """How many replayed and external groups batch j will take, by j; no entry is 0."""
        ...

    @property
    def awaited(self) -> Mapping[int, int]:
        """How many of the `promised` ones are not durable yet, by batch; no entry is 0."""
        ...

    @property
    def formed(self) -> Mapping[int, FormedView]:
        """Batches whose groups are remembered, ascending: those not trained yet, and the last few that are."""
        ...

    @property
    def interrupted(self) -> Mapping[int, Unit]:
        """Groups that were in flight when an earlier process ended, until a GroupDropped says what becomes of their prompts; not live."""
        ...

    @property
    def steps_ahead(self) -> float | None:
        """A as it was chosen last by `steps_ahead = "auto"`; None: never."""
        ...

    @property
    def latency_seconds(self) -> float:
        """E[L]: mean seconds from a group's admission until it is ready, recent groups; 0 before the first."""
        ...

    @property
    def cycle_seconds(self) -> float:
        """gamma: mean seconds from one trained batch to the next, recent batches; 0 before the second."""
        ...

    @property
    def rollouts_in_flight(self) -> int:
        """Members of running groups that have not ended."""
        ...

    @property
    def next_group(self) -> int:
        """The id that the next admitted group gets."""
        ...

    @property
    def exhausted(self) -> bool:
        """Whether the prompt source has ended."""
        ...

    @property
    def requeued(self) -> Mapping[tuple[str, int], int]:
        """Prompts (id, epoch) that wait to be tried again, and how often they were requeued."""
        ...

    @property
    def waiting(self) -> Mapping[tuple[str, int], int]:
        """Prompts (id, epoch) to be tried again that have not been admitted again, with how often they were tried before."""
        ...

    @property
    def waiting_prompts(self) -> int:
        """How many prompts wait to be tried again."""
        ...

    @property
    def failures(self) -> Mapping[str, int]:
        """How many groups of a prompt in a row lost too many members, by prompt id; no entry is 0."""
        ...

    @property
    def failed_in_row(self) -> int:
        """Groups in a row that lost too many members, of whatever prompts: none has become ready since the first of them."""
        ...

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Prompts that are never tried again, by id: why."""
        ...

    @property
    def held_size(self) -> int:
        """Payload bytes of finished rollouts that no batch has taken, of live groups and of others, in memory or on disk."""
        ...

    @property
    def resume_budget(self) -> ResumeBudget | None:
        """What a run that was taken up again may admit before its first new publication; None: that is past, or it never was."""
        ...

    @property
    def repeated_eval(self) -> int | None:
        """The version whose evaluation was cut short when the process ended, and has not been repeated."""
        ...

    @property
    def draining(self) -> str:
        """Why no further group is admitted; empty while the run goes on."""
        ...

    @property
    def barren(self) -> int:
        """Groups in a row of which none could train (dropped while running, not by the run itself, or ready without an advantage)."""
        ...

    @property
    def rewards(self) -> deque[tuple[int, float]]:
        """(batch, mean reward over all scored members) of the latest batches."""
        ...

    @property
    def eval_running(self) -> int | None:
        """The version under evaluation."""
        ...

    @property
    def last_eval(self) -> int:
        """The version that was evaluated last; -1: none."""
        ...

    @property
    def dropped(self) -> Mapping[str, int]:
        """Groups dropped, by cause (for reports)."""
        ...

    @property
    def lost(self) -> Mapping[str, int]:
        """Attempts lost, by cause (for reports)."""
        ...

    @property
    def last_loss(self) -> str:
        """Cause of the attempt that was lost last, and the first line of what is known of it (for reports)."""
        ...

    @property
    def alike(self) -> int:
        """How many of the `barren` groups were scored alike in all their members (for reports)."""
        ...

    @property
    def admitted(self) -> int:
        """Groups admitted by this ledger's history (for reports)."""
        ...

    @property
    def sampled_tokens(self) -> int:
        """Tokens of finished rollouts (for reports)."""
        ...
