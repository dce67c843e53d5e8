"""What a fake saw and did, entry by entry: in memory, and as JSON lines in a file that survives the kill of its process.

An entry is one `write` of one line in append mode, so processes may share a file, and only the last line of a killed one may be cut.
Times are Unix seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

Entry = dict[str, Any]
LogSource = Path | str | Sequence[Entry]
"""A fake's log: its file, or its entries."""

_encode = msgspec.json.Encoder().encode


class FakeLog:
    """The log of one fake. `entries` are those of this process; `path` None: in memory only."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.entries: list[Entry] = []
        self.listeners: list[Callable[[], None]] = []
        self._file: int | None = None
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def add(self, what: str, **facts: Any) -> Entry:
        """Log that something happened now; returns the entry."""
        entry = {"what": what, "time": time.time(), "pid": os.getpid(), **facts}
        self.entries.append(entry)
        if self._file is not None:
            os.write(self._file, _encode(entry) + b"\n")
        for listener in self.listeners:
            listener()
        return entry

    def of(self, *what: str) -> list[Entry]:
        """Return the entries of these kinds, oldest first."""
        return [entry for entry in self.entries if entry["what"] in what]

    def close(self) -> None:
        """Close the file; idempotent."""
        descriptor, self._file = self._file, None
        if descriptor is not None:
            os.close(descriptor)


def read_log(source: LogSource) -> list[Entry]:
    """Return the entries of a log; of a file, without a last line that a kill has cut short. A file that is not there has none."""
    if not isinstance(source, Path | str):
        return list(source)
    path = Path(source)
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def read_logs(sources: Iterable[LogSource]) -> list[Entry]:
    """Return the entries of several logs, in order of time."""
    return sorted((entry for source in sources for entry in read_log(source)), key=lambda entry: float(entry["time"]))
