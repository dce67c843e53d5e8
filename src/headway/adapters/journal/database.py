"""The SQLite file that holds a journal's events: made whole, checked when it is opened, written and read in large steps.

    header   key, value             schema_version, run_id
    events   sequence, checksum, event    numbered from 1 without a gap; CRC-32 of the line of JSON
    pruned   segment                segment files that were removed because nobody needed them: any other that is missing is damage

A new file is filled under another name and renamed, so a process that is killed while it begins leaves nothing behind that could be
mistaken for a journal; a file without tables is damage, never a beginning. Used by one thread at a time. Errors are StorageErrors that
name the file and the remedy.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from headway.errors import StorageError
from headway.formats.events import SCHEMA_VERSION
from headway.formats.files import sync, temporary_sibling

DATABASE = "events.sqlite"

_APPLICATION_ID = 0x48575931  # "HWY1": tells a journal from any other SQLite file
_TABLES = """
CREATE TABLE header (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (sequence INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, event TEXT NOT NULL);
CREATE TABLE pruned (segment INTEGER PRIMARY KEY);
"""
_RESTORE = "restore the state directory from a backup or start another run"
_READ_ONLY = "check the permissions, and that the file system is mounted for writing"
_REMEDIES = {
    sqlite3.SQLITE_FULL: "free space on the disk, then resume",
    sqlite3.SQLITE_IOERR: "free space on the disk and check it, then resume",
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_CANTOPEN: _READ_ONLY,
    sqlite3.SQLITE_PERM: _READ_ONLY,
    sqlite3.SQLITE_BUSY: "another process uses it: end that one first",
    sqlite3.SQLITE_LOCKED: "another process uses it: end that one first",
}
_CHUNK = 4096  # events fetched and checked at once


class Database:
    """One connection to a journal's events."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection

    @classmethod
    def open(cls, path: Path) -> Database:
        """Connect to an existing file for reading and writing. What `append` returned is durable."""
        with sqlite_errors(path, "cannot be opened"):
            # Opened in one thread, written in another, and never both at once: so the check for one thread is off.
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                connection.execute("PRAGMA cell_size_check = ON")  # a garbled page is an error, not an answer
                connection.execute("PRAGMA synchronous = FULL")
                _use_write_ahead_log(connection)
            except BaseException:
                connection.close()
                raise
        return cls(path, connection)

    def check(self, run_id: str) -> None:
        """Refuse a file that is foreign, newer, another run's, or whose structure is damaged."""
        with sqlite_errors(self._path, "cannot be opened"):
            self.check_owner(run_id)
            if (verdict := self._connection.execute("PRAGMA quick_check(1)").fetchone()) != ("ok",):
                raise damaged(self._path, str(verdict[0]))

    def check_owner(self, run_id: str) -> None:
        """Refuse a file that is foreign, newer or another run's. Raises sqlite3.Error too."""
        path = self._path
        if self._connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() == (0,):
            raise damaged(path, "it is empty")
        if self._connection.execute("PRAGMA application_id").fetchone() != (_APPLICATION_ID,):
            raise StorageError(f"{path}: is an SQLite file of something else: choose another run.state_directory")
        header = dict(self._connection.execute("SELECT key, value FROM header"))
        version, owner = header.get("schema_version"), header.get("run_id")
        if not isinstance(version, str) or not version.isdecimal() or not int(version) or owner is None:
            raise damaged(path, "its header is incomplete")
        if int(version) > SCHEMA_VERSION:
            raise StorageError(f"{path}: schema version {version}, this headway reads {SCHEMA_VERSION}: install a newer headway")
        if owner != run_id:
            raise StorageError(f"{path}: belongs to run {owner}, not to {run_id}: choose another run.state_directory")

    def chunks(self) -> Iterator[list[bytes]]:
        """Yield the lines of all events in order, many at a time; raises StorageError at the first that is missing or changed."""
        expected = 0
        with sqlite_errors(self._path, "cannot be read"):
            # As bytes: no decoding to text and back, and no trust in what the file says of its encoding.
            rows = self._connection.execute("SELECT sequence, checksum, CAST(event AS BLOB) FROM events ORDER BY sequence")
            while chunk := rows.fetchmany(_CHUNK):
                sequences, checksums, lines = zip(*chunk, strict=True)
                whole = sequences == tuple(range(expected + 1, expected + 1 + len(chunk))) and None not in lines
                if not whole or tuple(map(zlib.crc32, lines)) != checksums:
                    raise self._first_damaged(chunk, expected)
                expected += len(chunk)
                yield list(lines)

    def _first_damaged(self, chunk: Sequence[tuple[int, int, bytes | None]], expected: int) -> StorageError:
        """Return the error of the first event in a chunk that is missing or changed; the one before it has the number `expected`."""
        for sequence, checksum, line in chunk:
            expected += 1
            if sequence != expected:
                return damaged(self._path, f"event {expected} is missing")
            if line is None or zlib.crc32(line) != checksum:
                break
        return damaged(self._path, f"event {expected} does not match its checksum")

    def append(self, lines: Sequence[bytes], *, after: int) -> None:
        """Write events behind the one of number `after`; durable on return."""
        rows = [(after + i, zlib.crc32(line), line.decode()) for i, line in enumerate(lines, 1)]
        with sqlite_errors(self._path, "events cannot be written"):
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)
            self._connection.execute("COMMIT")

    def pruned(self) -> set[int]:
        """Return the numbers of the segments that were removed on purpose."""
        with sqlite_errors(self._path, "cannot be read"):
            return {number for (number,) in self._connection.execute("SELECT segment FROM pruned")}

    def mark_pruned(self, numbers: Iterable[int]) -> None:
        """Note that segments are about to be removed; durable on return."""
        with sqlite_errors(self._path, "cannot be written"):
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("INSERT OR IGNORE INTO pruned VALUES (?)", ((number,) for number in numbers))
            self._connection.execute("COMMIT")

    def close(self) -> None:
        """Move what is in the write-ahead log into the file and let it go; idempotent."""
        with sqlite_errors(self._path, "cannot be closed"):
            self._connection.close()


def create(path: Path, run_id: str) -> None:
    """Make an empty journal, whole and durable under its name. May raise OSError too."""
    temporary = temporary_sibling(path)
    try:
        with sqlite_errors(temporary, "cannot be created"), closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            header = {"schema_version": str(SCHEMA_VERSION), "run_id": run_id}
            connection.executemany("INSERT INTO header VALUES (?, ?)", header.items())
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute("COMMIT")
            _use_write_ahead_log(connection)
        sync(temporary)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def damaged(path: Path, how: str) -> StorageError:
    """Return the error of a journal that cannot be trusted."""
    return StorageError(f"{path}: is damaged: {how}: {_RESTORE}")


@contextmanager
def sqlite_errors(path: Path, what: str) -> Iterator[None]:
    """Turn an error of SQLite inside into a StorageError."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # a garbled file ends in messages that are garbled too
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest of it says more than can be acted on
        remedy = _REMEDIES.get(code, f"it is damaged, or no journal: {_RESTORE}")
        raise StorageError(f"{path}: {what}: {error}: {remedy}") from error


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
