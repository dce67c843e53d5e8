"""The journal counted a second time, plainly and by someone else than the ledger: where each group and each of its members is.

The ledger counts for decisions; this counts for the audit, so that a mistake of one is not a mistake of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from headway.events import (
    Admitted,
    AnyEvent,
    BatchAcknowledged,
    BatchFormed,
    Continued,
    Finished,
    GroupDropped,
    Ingested,
    PromptDropped,
    Ready,
    Resumed,
    RolloutDropped,
    SourceExhausted,
)

Place = Literal["running", "ready", "batch", "dropped", "interrupted"]


@dataclass(slots=True)
class Group:
    """One group: where it is, which of its members have finished, and which were lost for good."""

    prompt_id: str
    epoch: int
    birth: int
    members: int
    live: bool = True  # admitted by the gate; False: replayed or external
    place: Place = "running"
    batch: int = -1
    cause: str = ""
    requeued: bool = False
    finished: dict[int, Finished] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)


@dataclass
class Books:
    """All groups of a run by number; `problems`: what a history of a run cannot be."""

    groups: dict[int, Group] = field(default_factory=dict)
    batches: dict[int, tuple[int, ...]] = field(default_factory=dict)  # the newest formation of each
    dropped: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    trained: int = 0
    resumes: int = 0
    exhausted: bool = False
    gone_prompts: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    @property
    def at(self) -> Counter[Place]:
        """How many live groups are where."""
        return Counter(group.place for group in self.groups.values() if group.live)


def counted(events: Iterable[AnyEvent]) -> Books:
    """Count a history."""
    books = Books()
    for event in events:
        _count(books, event)
    return books


def _count(books: Books, event: AnyEvent) -> None:  # one case an event: read as the table that it is
    match event:
        case Admitted():
            if event.group in books.groups:
                books.problems.append(f"group {event.group} was admitted twice")
            books.groups[event.group] = Group(event.prompt_id, event.epoch, event.birth, event.members)
        case Ingested():
            books.groups[event.group] = Group(event.name, 0, -1, event.members, live=False)
        case Finished():
            _member(books, event.group, event.member, finished=event)
        case RolloutDropped():
            books.lost[event.cause] += 1
            if event.final:
                _member(books, event.group, event.member, lost=event.cause)
        case Ready():
            group = books.groups.get(event.group)
            if group is None:
                books.problems.append(f"group {event.group} is ready and was never admitted")
            elif group.place == "running":
                group.place = "ready"
                _complete(books, event.group, group)
        case GroupDropped():
            _dropped(books, event)
        case BatchFormed():
            _formed(books, event)
        case BatchAcknowledged():
            if event.k not in books.batches:
                books.problems.append(f"batch {event.k} is acknowledged and was never formed")
            books.trained = max(books.trained, event.k + 1)
        case Resumed():
            _resumed(books, event)
        case Continued():
            group = books.groups.get(event.group)
            if group is None or group.place != "interrupted":
                books.problems.append(f"group {event.group} goes on, and was not interrupted")
            else:
                group.place = "running"
        case SourceExhausted():
            books.exhausted = True
        case PromptDropped():
            books.gone_prompts.add(event.prompt_id)
        case _:
            pass  # of no group


def _member(books: Books, number: int, member: int, *, finished: Finished | None = None, lost: str = "") -> None:
    group = books.groups.get(number)
    if group is None:
        books.problems.append(f"rollout {number}-{member} ended, and its group was never admitted")
        return
    if not 0 <= member < group.members:
        books.problems.append(f"rollout {number}-{member} ended, and its group has {group.members} members")
    if finished is not None and group.place == "running":
        if member in group.finished and member not in group.lost:
            books.problems.append(f"rollout {number}-{member} finished twice")
        group.finished[member] = finished
    if lost:
        group.lost[member] = lost


def _complete(books: Books, number: int, group: Group) -> None:
    missing = sorted(set(range(group.members)) - group.finished.keys() - group.lost.keys())
    if missing:
        books.problems.append(f"group {number} is ready, and its members {missing} have neither finished nor been lost")


def _dropped(books: Books, event: GroupDropped) -> None:
    group = books.groups.get(event.group)
    if group is None:
        books.problems.append(f"group {event.group} is dropped and was never admitted")
    elif group.place == "batch":
        books.problems.append(f"group {event.group} is dropped ({event.cause}) and was in batch {group.batch}")
    elif group.place != "dropped":
        group.place, group.cause, group.requeued = "dropped", event.cause, event.requeued
        if group.live:
            books.dropped[event.cause] += 1


def _formed(books: Books, event: BatchFormed) -> None:
    if len(set(event.groups)) != len(event.groups):
        books.problems.append(f"batch {event.k} holds a group twice")
    for number in event.groups:
        group = books.groups.get(number)
        if group is None:
            books.problems.append(f"batch {event.k} holds group {number}, which was never admitted")
        elif group.place != "ready":
            books.problems.append(f"batch {event.k} holds group {number}, which is {group.place} {group.batch if group.batch >= 0 else ''}")
        else:
            group.place, group.batch = "batch", event.k
    books.batches[event.k] = event.groups


def _resumed(books: Books, event: Resumed) -> None:
    books.resumes += 1
    books.trained = event.version
    books.exhausted = False
    for number, group in books.groups.items():
        if group.place == "batch" and group.batch >= event.k:
            group.place, group.batch = "ready", -1
        elif group.place == "running":
            group.place = "interrupted" if group.live else "dropped"
            if not group.live:
                group.cause = "interrupted"
        if number < 0:
            books.problems.append(f"group {number}: no such number")
    for k in [k for k in books.batches if k >= event.k]:
        del books.batches[k]
