"""The journal on local disk: events in SQLite, rollouts in segment files beside it.

Promise: what `append` has returned survives a crash of the process and of the machine, in order and without gaps; no event refers to a
rollout that is not whole. The order of writes gives it: segment bytes, fdatasync, then one SQLite transaction for all entries of the call
(write-ahead log, synchronous = FULL: one fsync a commit; NORMAL would lose the last commits with the machine). Whoever calls with many
entries at once shares both syncs among them: about 1 ms a call on an NVMe disk, a few microseconds an event.

All writing happens in one thread of the journal's own; the event loop never waits for the disk. A write that failed is final: the file may
end in half a record, so every later call is refused with the same cause. Events and records carry a CRC-32, so that a flipped bit is
refused and not replayed; opening checks all events, and that every segment is there and long enough. One process at a time: the run
directory's lock sees to that.

A history that lost its newest end to a damaged write-ahead log is still a history: SQLite recovers the commits before the damage, and what
they do not refer to is cut away.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec

from headway.adapters.journal.database import DATABASE, Database, create, damaged
from headway.adapters.journal.local_disk import refuse_network_file_system
from headway.adapters.journal.segments import SEGMENT_BYTES, SegmentIndex, Segments
from headway.errors import StorageError
from headway.events import AnyEvent
from headway.formats.events import decode_events, encode_event
from headway.formats.files import remove_temporaries, storage_errors
from headway.formats.rollout import decode_rollout, encode_rollout
from headway.protocols import Entry
from headway.types import PayloadReference, Rollout

SEGMENTS = "segments"


class _Stored(msgspec.Struct, frozen=True):
    """Of any event, what tells whose rollout it refers to; the rest is skipped."""

    group: int = -1
    reference: PayloadReference | None = None


_stored_decoder = msgspec.json.Decoder(list[_Stored])


class SqliteJournal:
    """A run's history in `directory`, created when it is not there yet.

    Raises StorageError when what lies there cannot be this run's journal, ConfigError when the disk is not a local one.
    """

    def __init__(self, directory: Path, *, run_id: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._path = directory / DATABASE
        self._failure: StorageError | None = None
        self._closed = False
        with storage_errors(f"{directory}: the journal cannot be created"):
            directory.mkdir(parents=True, exist_ok=True)
            refuse_network_file_system(directory)
            remove_temporaries(directory)
            if not self._path.exists():
                self._refuse_lost_events(directory)
                create(self._path, run_id)
            os.close(os.open(self._path, os.O_RDWR))  # its own words for a disk that is read-only, where SQLite has only one
        self._database = Database.open(self._path)
        try:
            self._database.check(run_id)
            self._sequence, index = self._contents()
            self._segments = Segments(directory / SEGMENTS, index=index, pruned=self._database.pruned(), segment_bytes=segment_bytes)
        except BaseException:
            self._database.close()
            raise
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    async def append(self, entries: Sequence[Entry]) -> Sequence[AnyEvent]:
        """Write the entries in order and return their events as written (references filled in); durable on return.

        Raises StorageError when they could not be written, and from then on always. A cancelled call may still have written.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._append, entries)

    def replay(self) -> Iterator[AnyEvent]:
        """Yield every event from the first, in order; raises StorageError at the first that is missing or changed."""
        with closing(Database.open(self._path)) as database:
            for lines in database.chunks():
                yield from decode_events(lines)

    async def read(self, reference: PayloadReference) -> Rollout:
        """Return the rollout whose record lies there; raises StorageError when it is damaged."""
        data = await asyncio.get_running_loop().run_in_executor(self._thread, self._segments.read, reference)
        return decode_rollout(data)

    async def prune(self, needed: Collection[int]) -> None:
        """Remove the segments that hold rollouts of none of the groups that are needed; never the one that is being written.

        A group that was admitted after the newest of `needed` is kept. Raises StorageError when it cannot be recorded.
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self._prune, needed)

    async def close(self) -> None:
        """Flush and release; idempotent."""
        if not self._closed:
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._release)
            self._thread.shutdown()

    # ----------------------------------------------------------------------------------------------------------- in the journal's thread

    def _append(self, entries: Sequence[Entry]) -> list[AnyEvent]:
        if self._failure is not None:
            raise self._failure
        try:
            return self._write(entries)
        except StorageError as error:
            self._failure = error
            raise

    def _write(self, entries: Sequence[Entry]) -> list[AnyEvent]:
        events = [entry.event for entry in entries]
        stored = [(i, rollout) for i, entry in enumerate(entries) if (rollout := entry.rollout) is not None]
        references = self._segments.append([(rollout.group, encode_rollout(rollout)) for _, rollout in stored])
        for (i, _), reference in zip(stored, references, strict=True):
            events[i] = msgspec.structs.replace(events[i], reference=reference)
        self._database.append([encode_event(event) for event in events], after=self._sequence)
        self._sequence += len(events)
        return events

    def _prune(self, needed: Collection[int]) -> None:
        if self._failure is not None:
            raise self._failure
        numbers = self._segments.unneeded(needed)
        if not numbers:
            return
        try:
            self._database.mark_pruned(numbers)  # first: a segment that is missing without it is damage
        except StorageError as error:
            self._failure = error
            raise
        self._segments.remove(numbers)

    def _release(self) -> None:
        self._segments.close()
        self._database.close()

    # ------------------------------------------------------------------------------------------------------------------- at the opening

    def _refuse_lost_events(self, directory: Path) -> None:
        """Refuse to begin beside segments: a journal has its file before the first record is written, so it was lost."""
        if any((directory / SEGMENTS).glob("*.rollouts")):
            raise damaged(self._path, "it is missing, and there are segments that belong to it")

    def _contents(self) -> tuple[int, SegmentIndex]:
        """Check every event; return how many there are, and what they refer to."""
        count, index = 0, SegmentIndex()
        for lines in self._database.chunks():
            count += len(lines)
            try:
                events = _stored_decoder.decode(b"[" + b",".join(lines) + b"]")
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise damaged(self._path, f"an event up to number {count} cannot be read: {error}") from error
            for event in events:
                if event.reference is not None:
                    index.add(event.group, event.reference)
        return count, index
