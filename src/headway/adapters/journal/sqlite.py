"""The journal on local disk: events in SQLite, rollouts in segment files beside it.

Promise: what `append` has returned survives a crash of the process and of the machine, in order and without gaps; no event refers to a
rollout that is not whole. The order of writes gives it: segment bytes, fdatasync, then one SQLite transaction for all entries of the call
(write-ahead log, synchronous = FULL: one fsync a commit; NORMAL would lose the last commits with the machine). Whoever calls with many
entries at once shares both syncs among them: about 1 ms a call on an NVMe disk, a few microseconds an event.

All writing happens in one thread of the journal's own; the event loop never waits for the disk. A write that failed is final: the file may
end in half a record, so every later call is refused with the same cause. Events carry a CRC-32, so that a flipped bit is refused and not
replayed. One process at a time: the run directory's lock sees to that.
"""

from __future__ import annotations

import asyncio
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from headway.adapters.journal.local_disk import refuse_network_file_system
from headway.adapters.journal.segments import SEGMENT_BYTES, Segments
from headway.errors import StorageError
from headway.events import AnyEvent, Finished
from headway.formats.events import SCHEMA_VERSION, decode_event, encode_event
from headway.formats.files import storage_errors, sync
from headway.formats.rollout import decode_rollout, encode_rollout
from headway.protocols import Entry
from headway.types import PayloadReference, Rollout

DATABASE = "events.sqlite"
SEGMENTS = "segments"

_APPLICATION_ID = 0x48575931  # "HWY1": tells a journal from any other SQLite file
_TABLES = """
CREATE TABLE header (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (sequence INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, event TEXT NOT NULL);
"""


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
        self._connection = self._open(run_id)
        try:
            with self._sqlite_errors("cannot be read"):
                self._sequence = self._check_events()
                last = self._last_reference()
            self._segments = Segments(directory / SEGMENTS, last=last, segment_bytes=segment_bytes)
        except BaseException:
            self._connection.close()
            raise
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    async def append(self, entries: Sequence[Entry]) -> Sequence[AnyEvent]:
        """Write the entries in order and return their events as written (references filled in); durable on return.

        Raises StorageError when they could not be written, and from then on always. A cancelled call may still have written.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._append, entries)

    def replay(self) -> Iterator[AnyEvent]:
        """Yield every event from the first, in order; raises StorageError at the first that is missing or changed."""
        with self._sqlite_errors("cannot be read"), closing(self._connect()) as connection:
            rows = connection.execute("SELECT sequence, checksum, event FROM events ORDER BY sequence")
            for expected, (sequence, checksum, text) in enumerate(rows, 1):
                if sequence != expected:
                    raise self._damaged(f"event {expected} is missing")
                yield self._decode(sequence, checksum, text)

    async def read(self, reference: PayloadReference) -> Rollout:
        """Return the rollout whose record lies there; raises StorageError when it is damaged."""
        data = await asyncio.get_running_loop().run_in_executor(self._thread, self._segments.read, reference)
        return decode_rollout(data)

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
        stored = [i for i, entry in enumerate(entries) if entry.rollout is not None]
        references = self._segments.append([encode_rollout(rollout) for entry in entries if (rollout := entry.rollout) is not None])
        for i, reference in zip(stored, references, strict=True):
            events[i] = msgspec.structs.replace(events[i], reference=reference)
        lines = [encode_event(event) for event in events]
        rows = [(self._sequence + i, zlib.crc32(line), line.decode()) for i, line in enumerate(lines, 1)]
        with self._sqlite_errors("events cannot be written"):
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)
            self._connection.execute("COMMIT")
        self._sequence += len(rows)
        return events

    def _release(self) -> None:
        self._segments.close()
        with self._sqlite_errors("cannot be closed"):
            self._connection.close()

    # ------------------------------------------------------------------------------------------------------------------- at the opening

    def _connect(self) -> sqlite3.Connection:
        # The constructor's thread opens, the journal's thread writes: never both at once, so the check for one thread is off.
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    def _open(self, run_id: str) -> sqlite3.Connection:
        """Connect, creating the tables in a new file; refuse a file that is foreign, newer, or another run's."""
        with self._sqlite_errors("is not a journal, or is damaged"):
            connection = self._connect()
            try:
                if connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() == (0,):
                    self._create(connection, run_id)
                elif connection.execute("PRAGMA application_id").fetchone() != (_APPLICATION_ID,):
                    raise StorageError(f"{self._path}: is an SQLite file of something else: choose another run.state_directory")
                self._check_header(dict(connection.execute("SELECT key, value FROM header")), run_id)
            except BaseException:
                connection.close()
                raise
        return connection

    def _create(self, connection: sqlite3.Connection, run_id: str) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        for statement in _TABLES.split(";"):
            connection.execute(statement)
        header = {"schema_version": str(SCHEMA_VERSION), "run_id": run_id}
        connection.executemany("INSERT INTO header VALUES (?, ?)", header.items())
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute("COMMIT")
        sync(self._path.parent)

    def _check_header(self, header: dict[str, str], run_id: str) -> None:
        version, owner = header.get("schema_version", ""), header.get("run_id")
        if not version.isdigit() or owner is None:
            raise self._damaged("its header is incomplete")
        if int(version) > SCHEMA_VERSION:
            raise StorageError(f"{self._path}: schema version {version}, this headway reads {SCHEMA_VERSION}: install a newer headway")
        if owner != run_id:
            raise StorageError(f"{self._path}: belongs to run {owner}, not to {run_id}: choose another run.state_directory")

    def _check_events(self) -> int:
        """Check the file's structure and that no event is missing; return the last sequence number."""
        if (verdict := self._connection.execute("PRAGMA quick_check(1)").fetchone()) != ("ok",):
            raise self._damaged(str(verdict[0]))
        count, last = self._connection.execute("SELECT COUNT(*), COALESCE(MAX(sequence), 0) FROM events").fetchone()
        if count != last:
            raise self._damaged(f"{last - count} events are missing")
        return int(last)

    def _last_reference(self) -> PayloadReference | None:
        for row in self._connection.execute("SELECT sequence, checksum, event FROM events ORDER BY sequence DESC"):
            event = self._decode(*row)
            if isinstance(event, Finished) and event.reference is not None:
                return event.reference
        return None

    def _decode(self, sequence: int, checksum: int, text: str) -> AnyEvent:
        if zlib.crc32(text.encode()) != checksum:
            raise self._damaged(f"event {sequence} does not match its checksum")
        return decode_event(text)

    def _damaged(self, how: str) -> StorageError:
        return StorageError(f"{self._path}: is damaged: {how}: restore the state directory from a backup or start another run")

    @contextmanager
    def _sqlite_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            remedy = "restore the state directory, free space on the disk, or start another run"
            raise StorageError(f"{self._path}: {what}: {error}: {remedy}") from error
