"""Reads a run's journal beside its writer: nothing is locked, cut or created, and what is read is one consistent state.

`SqliteJournal` is for the process that owns the run: opening it cuts away what a crash left behind. This reads events only.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from headway.adapters.journal.sqlite import DATABASE
from headway.errors import StorageError
from headway.events import AnyEvent
from headway.formats.events import SCHEMA_VERSION, decode_event


def read_events(directory: Path, *, run_id: str) -> Iterator[AnyEvent]:
    """Yield every event of the journal in `directory`, in order; raises StorageError for what is no journal of this run, or damaged."""
    path = directory / DATABASE
    if not path.is_file():
        raise StorageError(f"{path}: no such file: is the state directory of this run on another machine?")
    try:
        with closing(_connect(path)) as connection:
            connection.execute("BEGIN")
            header = dict(connection.execute("SELECT key, value FROM header"))
            if header.get("run_id") != run_id:
                raise StorageError(f"{path}: belongs to run {header.get('run_id')}, not to {run_id}")
            if int(header.get("schema_version", 0)) > SCHEMA_VERSION:
                raise StorageError(f"{path}: written by a newer headway: install that version")
            rows = connection.execute("SELECT sequence, checksum, event FROM events ORDER BY sequence")
            for expected, (sequence, checksum, text) in enumerate(rows, 1):
                if sequence != expected:
                    raise StorageError(f"{path}: is damaged: event {expected} is missing")
                if zlib.crc32(text.encode()) != checksum:
                    raise StorageError(f"{path}: is damaged: event {sequence} does not match its checksum")
                yield decode_event(text)
    except sqlite3.Error as error:
        raise StorageError(f"{path}: cannot be read: {error}") from error


def _connect(path: Path) -> sqlite3.Connection:
    """Open for reading. Without a write-ahead log nobody writes: then even a read-only disk will do, and no file is left behind."""
    nobody_writes = not path.with_name(path.name + "-wal").exists()
    options = "mode=ro&immutable=1" if nobody_writes else "mode=ro"
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?{options}", uri=True, isolation_level=None)
