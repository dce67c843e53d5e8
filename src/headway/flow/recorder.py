"""The recorder owns the one ledger and writes the journal: state changes here, in one breath, and nowhere else.

Order of history: admissions, drops and publications apply at once and are journalled behind (`record`); a finished rollout counts only
once it is durable (`commit`: written first, then applied). Entries are written in the order in which they came, many in one go (group
commit), by `run`.
"""

from __future__ import annotations

import asyncio

from headway.errors import StorageError
from headway.flow.watch import Watch
from headway.protocols import Entry, Journal
from headway.rules.ledger import Ledger, apply
from headway.types import AnyEvent, Rollout

WRITE_BYTES = 32 * 1024 * 1024  # of payload in one append, about: the journal holds a second copy of no more, and shares the interpreter


class Recorder:
    """Applies events to the ledger and writes them to the journal."""

    def __init__(self, journal: Journal, *, ledger: Ledger | None = None) -> None:
        self._journal = journal
        self._ledger = Ledger() if ledger is None else ledger
        self.watch = Watch(self._ledger)
        self._entries: list[Entry] = []
        self._commits: dict[int, asyncio.Future[None]] = {}  # by index in _entries: applied only once durable
        self._flushes: list[asyncio.Future[None]] = []
        self._writing = False
        self._wake = asyncio.Event()
        self._closing = False

    def record(self, event: AnyEvent) -> None:
        """Apply an event now; it is journalled behind."""
        self._check_open()
        apply(self._ledger, event)
        self._append(Entry(event))
        self.watch.touch()

    async def commit(self, event: AnyEvent, rollout: Rollout | None = None) -> None:
        """Write an event (and the rollout it refers to); it is applied, and this returns, once it is durable."""
        self._check_open()
        future = asyncio.get_running_loop().create_future()
        self._commits[len(self._entries)] = future
        self._append(Entry(event, rollout))
        await future

    async def flush(self) -> None:
        """Return once everything recorded so far is durable."""
        if self._entries or self._writing:
            future = asyncio.get_running_loop().create_future()
            self._flushes.append(future)
            self._wake.set()
            await future

    def close(self) -> None:
        """Let `run` end once all that is pending is written."""
        self._closing = True
        self._wake.set()

    async def run(self) -> None:
        """Write what comes until closed. A journal that cannot be written ends the run: StorageError."""
        while self._entries or self._flushes or not self._closing:
            await self._wake.wait()
            self._wake.clear()
            while self._entries or self._flushes:
                await self._write()

    def _check_open(self) -> None:
        if self._closing:
            raise StorageError("the journal is closed: nothing can be recorded after the end of the run")

    def _append(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._wake.set()

    def _take(self) -> tuple[list[Entry], dict[int, asyncio.Future[None]], list[asyncio.Future[None]]]:
        """Take what is written next: everything pending, unless that is many bytes; then the first of it, and flushes wait."""
        size = 0
        for index, entry in enumerate(self._entries):
            size += 0 if entry.rollout is None else len(entry.rollout.payload)
            if size > WRITE_BYTES and index + 1 < len(self._entries):
                entries, self._entries = self._entries[: index + 1], self._entries[index + 1 :]
                commits = {at: future for at, future in self._commits.items() if at <= index}
                self._commits = {at - index - 1: future for at, future in self._commits.items() if at > index}
                return entries, commits, []
        taken = self._entries, self._commits, self._flushes
        self._entries, self._commits, self._flushes = [], {}, []
        return taken

    async def _write(self) -> None:
        entries, commits, flushes = self._take()
        self._writing = True
        if entries:
            written = await self._journal.append(entries)
            for index in commits:
                apply(self._ledger, written[index])
            self.watch.touch()
        self._writing = False
        for future in (*commits.values(), *flushes):
            if not future.done():
                future.set_result(None)
