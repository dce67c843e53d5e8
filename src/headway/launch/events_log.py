"""The log for people, `events.log` in the run directory: what happened, without secrets, for as long as there is room on the disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headway.formats.bounded import refuse_irregular
from headway.formats.files import storage_errors
from headway.secrecy import ConcealingFormatter

_log = logging.getLogger("headway")


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Append what headway logs to `path`; raises StorageError where it cannot be opened."""
    with storage_errors(f"{path}: cannot be opened"):
        refuse_irregular(path)
        handler = _EventLog(path, encoding="utf-8")
    handler.setFormatter(ConcealingFormatter("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        handler.close()


class _EventLog(logging.FileHandler):
    """The log for people. Lines that a full disk has no room for are lost, and nothing else with them."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Let the line go."""

    def close(self) -> None:
        """Close the file; idempotent."""
        with suppress(OSError):
            super().close()
