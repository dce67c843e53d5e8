"""What a journal comes to for whoever takes the run up again: ledger, place in the prompts, and a record of each group that may train yet.

One pass over the events. A group is forgotten when it is dropped, and when its batch was trained so long ago that the ledger has forgotten
it too: what is held is what is alive, however long the history.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec

from headway.events import (
    Admitted,
    AnyEvent,
    BatchAcknowledged,
    BatchFormed,
    Ended,
    Finished,
    GroupDropped,
    Ingested,
    Ready,
    Resumed,
    RolloutDropped,
)
from headway.protocols import Journal
from headway.rules.ledger import Ledger, apply
from headway.rules.position import Consumed
from headway.types import Cause, Source

_EVENTS_AT_ONCE = 20_000  # folded before the event loop gets a turn: a signal is not kept waiting by a long history


class GroupRecord(msgspec.Struct):
    """A group as the journal tells of it. `finished`: its durable members that no scorer or length limit has taken away since.

    All stamps in them are of the line in force, or the group would have been dropped when a later lineage began. `scores` and `parts` are
    a scorer's; `ready_version` None: not ready.
    """

    prompt_id: str
    epoch: int
    members: int
    birth: int
    tries: int = 0
    source: Source = "live"
    finished: dict[int, Finished] = {}
    lost: dict[int, Cause] = {}
    scores: dict[int, float] = {}
    parts: dict[int, dict[str, float]] = {}
    ready_version: int | None = None

    @property
    def tail(self) -> int:
        """The newest stamp in the finished members; -1: none has finished."""
        return max([event.tail for event in self.finished.values()], default=-1)

    @property
    def head(self) -> int:
        """The oldest stamp in the finished members; -1: none has finished."""
        return min([event.head for event in self.finished.values()], default=-1)


class History:
    """The fold of a journal. `lineage` is the one in force; `ended` the exit code that the last process wrote down, if it came to that.

    `furthest`: the most batches that were ever trained, in any lineage. What is kept of a run was kept by this.
    """

    def __init__(self, lineage: str) -> None:
        self.ledger = Ledger()
        self.lineage = lineage
        self._forks = [(-1, lineage)]  # ascending: each lineage made the versions above its fork, up to the next
        self.groups: dict[int, GroupRecord] = {}
        self.consumed = Consumed()
        self.replayed: Counter[str] = Counter()  # groups that a replay source gave and that became durable, by name
        self.events = 0
        self.furthest = 0
        self.ended: int | None = None
        self._formed: dict[int, tuple[int, ...]] = {}  # the groups of the batches that the ledger remembers
        self._offered: dict[int, str] = {}  # names of replayed groups that hold a place

    def apply(self, event: AnyEvent) -> None:
        """Fold one event. Raises ValueError when the history contradicts itself."""
        places = tuple(self.ledger.ingested) if isinstance(event, Resumed) else ()
        apply(self.ledger, event)
        self.events += 1
        self.ended = None
        match event:
            case Finished():
                self._finished(event)
            case Admitted():
                self.consumed.admitted(event)
                tries = self.ledger.running[event.group].tries
                self.groups[event.group] = GroupRecord(event.prompt_id, event.epoch, event.members, event.birth, tries)
            case Ready():
                self._ready(event)
            case RolloutDropped():
                self._lost(event)
            case GroupDropped():
                self.groups.pop(event.group, None)
                self._offered.pop(event.group, None)
            case Ingested():
                self.groups[event.group] = GroupRecord(event.name, 0, event.members, -1, source=event.source)
                if event.source == "replay":
                    self._offered[event.group] = event.name
                    self.replayed[event.name] += 1
            case BatchFormed():
                self._formed[event.k] = event.groups
            case BatchAcknowledged():
                self.furthest = max(self.furthest, self.ledger.trained)
                self._forget_trained()
            case Resumed():
                self.furthest = max(self.furthest, self.ledger.trained)
                self._resumed(event, places)
            case Ended():
                self.ended = event.code
            case _:
                pass  # nothing of it belongs to a group

    def maker(self, version: int) -> str:
        """Return the lineage that made a version of the line in force."""
        for fork, lineage in reversed(self._forks):
            if version > fork:
                return lineage
        return self._forks[0][1]

    def _finished(self, event: Finished) -> None:
        record = self.groups.get(event.group)
        if record is not None:
            record.finished[event.member] = event

    def _ready(self, event: Ready) -> None:
        record = self.groups.get(event.group)
        if record is not None:
            record.ready_version = self.ledger.version
            if event.scores:
                record.scores = dict(event.scores)
            if event.score_parts:
                record.parts = dict(event.score_parts)

    def _lost(self, event: RolloutDropped) -> None:
        record = self.groups.get(event.group)
        if record is not None and event.final:
            record.finished.pop(event.member, None)
            record.lost[event.member] = event.cause

    def _forget_trained(self) -> None:
        for k in [k for k in self._formed if k not in self.ledger.formed]:
            for group in self._formed.pop(k):
                self.groups.pop(group, None)
                self._offered.pop(group, None)

    def _resumed(self, event: Resumed, places: tuple[int, ...]) -> None:
        if event.lineage != self.lineage:
            self.lineage = event.lineage
            self._forks = [(fork, lineage) for fork, lineage in self._forks if fork < event.version]
            self._forks.append((event.version, event.lineage))
        for k in [k for k in self._formed if k >= event.k]:
            del self._formed[k]
        for group in places:
            if group not in self.ledger.ingested:  # its sender has had no answer: it comes again
                self.groups.pop(group, None)
                if (name := self._offered.pop(group, None)) is not None:
                    self.replayed[name] -= 1


async def read_history(journal: Journal, *, lineage: str) -> History:
    """Fold a run's journal; `lineage` is the one that it began with. Raises StorageError where the journal is damaged."""
    history = History(lineage)
    for event in journal.replay():
        history.apply(event)
        if history.events % _EVENTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return history
