"""Reads a run's journal beside its writer: nothing is locked, cut or created, and what is read is one consistent state.

`SqliteJournal` is for the process that owns the run: opening it cuts away what a crash left behind. This reads events only.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from headway.adapters.journal.database import DATABASE, Database, sqlite_errors
from headway.errors import StorageError
from headway.events import AnyEvent
from headway.formats.events import decode_events


def read_events(directory: Path, *, run_id: str) -> Iterator[AnyEvent]:
    """Yield every event of the journal in `directory`, in order; raises StorageError for what is no journal of this run, or damaged."""
    path = directory / DATABASE
    if not path.is_file():
        raise StorageError(f"{path}: no such file: is the state directory of this run on another machine?")
    with sqlite_errors(path, "cannot be read"), closing(_connect(path)) as connection:
        connection.execute("BEGIN")
        database = Database(path, connection)
        database.check_owner(run_id)
        for lines in database.chunks():
            yield from decode_events(lines)


def _connect(path: Path) -> sqlite3.Connection:
    """Open for reading. Without a write-ahead log nobody writes: then even a read-only disk will do, and no file is left behind."""
    nobody_writes = not path.with_name(path.name + "-wal").exists()
    options = "mode=ro&immutable=1" if nobody_writes else "mode=ro"
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?{options}", uri=True, isolation_level=None)
