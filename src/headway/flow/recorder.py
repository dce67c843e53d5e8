"""The recorder owns the one ledger and writes the journal: state changes here, in one breath, and nowhere else.

Order of history: admissions, drops and publications apply at once and are journalled behind (`record`); a finished rollout counts only
once it is durable (`commit`: written first, then applied). Entries are written in the order in which they came, many in one go (group
commit), by `run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from headway.errors import StorageError
from headway.events import AnyEvent
from headway.flow.watch import Watch
from headway.protocols import Entry, Journal
from headway.rules.changes import frees_slots_only
from headway.rules.ledger import Ledger, apply
from headway.types import Rollout

Told = TypeVar("Told")

WRITE_BYTES = 32 * 1024 * 1024  # of payload in one append, about: the journal holds a second copy of no more, and shares the interpreter


class Recorder:
    """Applies events to the ledger and writes them to the journal; `heed` hears of each once it is applied."""

    def __init__(self, journal: Journal, *, ledger: Ledger | None = None, heed: Callable[[AnyEvent], None] | None = None) -> None:
        self._journal = journal
        self._heed = heed
        self.writing_since: float | None = None  # loop time at which the journal was given what it has not written yet
        self._ledger = Ledger() if ledger is None else ledger
        self.watch = Watch(self._ledger)
        self._entries: list[Entry] = []  # not yet given to the journal
        self._recorded = 0  # entries so far; the first is number 0
        self._durable = 0  # of them, written
        self._commits: dict[int, asyncio.Future[AnyEvent]] = {}  # by number of the entry: applied only once durable
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []  # by how many entries must be durable
        self._wake = asyncio.Event()
        self._closing = False

    def record(self, event: AnyEvent) -> None:
        """Apply an event now; it is journalled behind."""
        self._check_open()
        apply(self._ledger, event)
        if self._heed is not None:
            self._heed(event)
        self._append(Entry(event))
        self.watch.touch(only_slots=frees_slots_only(event))

    def commit(self, event: AnyEvent, rollout: Rollout | None = None) -> asyncio.Future[AnyEvent]:
        """Write an event (and the rollout it refers to); once it is durable it is applied and returned, as written: with its reference."""
        self._check_open()
        future: asyncio.Future[AnyEvent] = asyncio.get_running_loop().create_future()
        self._commits[self._recorded] = future
        self._append(Entry(event, rollout))
        return future

    async def flush(self) -> None:
        """Return once everything recorded so far is durable."""
        if self._durable < self._recorded:
            future = asyncio.get_running_loop().create_future()
            self._flushes.append((self._recorded, future))
            await future

    def close(self) -> None:
        """Let `run` end once all that is pending is written."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Write what comes until closed. A journal that cannot be written ends the run: StorageError."""
        while self._entries or not self._closing:
            await self._wake.wait()
            self._wake.clear()
            while self._entries:
                await self._write()

    def _check_open(self) -> None:
        if self._closing:
            raise StorageError("the journal is closed: nothing can be recorded after the end of the run")

    def _append(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._recorded += 1
        self._wake.set()

    def _take(self) -> list[Entry]:
        """Take what is written next: everything pending, or the first of it when that is many bytes."""
        count = size = 0
        for entry in self._entries:
            if size > WRITE_BYTES:
                break
            size += 0 if entry.rollout is None else len(entry.rollout.payload)
            count += 1
        taken, self._entries = self._entries[:count], self._entries[count:]
        return taken

    async def _write(self) -> None:
        self.writing_since = asyncio.get_running_loop().time()
        written = await self._journal.append(self._take())
        self.writing_since = None
        applied = []  # what was recorded without a commit was applied then
        for number, event in enumerate(written, self._durable):
            if (committed := self._commits.pop(number, None)) is not None:
                apply(self._ledger, event)
                if self._heed is not None:
                    self._heed(event)
                applied.append(event)
                _tell(committed, event)
        self._durable += len(written)
        while self._flushes and self._flushes[0][0] <= self._durable:
            _tell(self._flushes.pop(0)[1], None)
        self.watch.touch(only_slots=all(map(frees_slots_only, applied)))


def _tell(future: asyncio.Future[Told], what: Told) -> None:
    if not future.done():  # whoever waited may have been cancelled
        future.set_result(what)
