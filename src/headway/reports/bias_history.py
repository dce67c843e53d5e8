"""The rollouts, groups, batches and prompts of a run, as its journal tells of them: what the audit of selection bias is made from.

Rollouts that were replayed or came from outside are left out: this run has not generated them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from headway.events import (
    Admitted,
    AnyEvent,
    BatchAcknowledged,
    BatchFormed,
    Finished,
    GroupDropped,
    Ingested,
    Ready,
    Resumed,
    RolloutDropped,
)


@dataclass(slots=True)
class Group:
    """An admitted group: the rollouts of it that finished, by member, and what became of it."""

    prompt_id: str
    members: int
    rollouts: dict[int, Finished] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)  # finished, and lost to a scorer or for their length
    lost: int = 0  # members that never finished
    ready: bool = False
    dropped: str = ""


class History:
    """A fold of the journal. `lost` counts members that never finished, by their cause or their group's."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.formed: dict[int, tuple[int, ...]] = {}
        self.acknowledged: set[int] = set()
        self.lost: Counter[str] = Counter()
        self.requeued: Counter[str] = Counter()
        self.given_up: Counter[str] = Counter()
        self._replayed: set[int] = set()

    def apply(self, event: AnyEvent) -> None:
        """Fold one event. Raises KeyError when the history contradicts itself."""
        match event:
            case Admitted():
                self.groups[event.group] = Group(event.prompt_id, event.members)
            case Ingested():
                self._replayed.add(event.group)
            case Finished() if event.group not in self._replayed:
                group = self.groups[event.group]
                group.rollouts[event.member] = event
                if group.dropped and not group.ready:
                    self.lost[group.dropped] -= 1  # it became durable in the moment in which its group was cut short
            case RolloutDropped(finished=True) if event.group not in self._replayed:
                self.groups[event.group].gone.add(event.member)
            case RolloutDropped(final=True, finished=False) if event.group not in self._replayed:
                self.lost[event.cause] += 1
                self.groups[event.group].lost += 1
            case Ready() if event.group not in self._replayed:
                self.groups[event.group].ready = True
                rollouts = self.groups[event.group].rollouts
                for member, score in event.scores:
                    rollouts[member] = msgspec.structs.replace(rollouts[member], reward=score)
            case GroupDropped() if event.group not in self._replayed:
                group = self.groups[event.group]
                group.dropped = event.cause
                if not group.ready and (cut_short := group.members - len(group.rollouts) - group.lost):
                    self.lost[event.cause] += cut_short
                self.requeued[group.prompt_id] += event.requeued
                self.given_up[group.prompt_id] += event.cause == "stale" and not event.requeued
            case BatchFormed():
                self.formed[event.k] = tuple(group for group in event.groups if group not in self._replayed)
            case BatchAcknowledged():
                self.acknowledged.add(event.k)
            case Resumed():
                for k in [k for k in self.formed if k >= event.k]:
                    del self.formed[k]
                    self.acknowledged.discard(k)
            case _:
                pass  # says nothing of a rollout

    def trained(self) -> dict[int, int]:
        """Return the batch of each group that was trained on."""
        return {group: k for k, groups in self.formed.items() if k in self.acknowledged for group in groups}
