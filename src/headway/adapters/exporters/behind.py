"""An exporter of somebody's, kept away from the run: in a thread of its own, behind a bounded queue, made there as well.

Whatever it does (raises when it is made, blocks for ten minutes, never closes), the run goes on: rows that the queue has no room for are
dropped and counted, the first loss of each kind is reported, and `close` waits no longer than its limit.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from headway.protocols import Exporter

ROWS_WAITING = 1000
CLOSE_SECONDS = 10.0

_log = logging.getLogger("headway")
_Row = tuple[str, Mapping[str, Any]]


class BehindExporter:
    """Passes rows on to what `make` makes. `lost` counts rows that never got there."""

    def __init__(
        self, name: str, make: Callable[[], Exporter], *, rows_waiting: int = ROWS_WAITING, close_seconds: float = CLOSE_SECONDS
    ) -> None:
        self.name = name
        self.lost = 0
        self._make = make
        self._close_seconds = close_seconds
        self._rows: queue.Queue[_Row | None] = queue.Queue(rows_waiting)
        self._told: set[str] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"exporter {name}", daemon=True)
        self._thread.start()

    def export(self, stream: str, row: Mapping[str, Any]) -> None:
        """Hand a row over; never waits, never raises."""
        try:
            self._rows.put_nowait((stream, dict(row)))  # a copy: what is somebody else's may be changed there
        except queue.Full:
            self._lose(1, "it does not keep up")

    def close(self) -> None:
        """Let it take what waits and close, within the limit; idempotent. A thread that hangs longer ends with the process."""
        due = time.monotonic() + self._close_seconds
        if not self._closing:
            self._closing = True
            with suppress(queue.Full):
                self._rows.put(None, timeout=self._close_seconds)
        self._thread.join(max(0.0, due - time.monotonic()))
        if self._thread.is_alive():
            self._lose(self._rows.qsize(), f"it did not close within {self._close_seconds:g} s")

    def _work(self) -> None:
        try:
            exporter: Exporter | None = self._make()
        except (Exception, SystemExit) as error:  # noqa: BLE001  metrics never end a run
            exporter = None
            self._lose(0, f"it could not be started: {type(error).__name__}: {error}")
        while (row := self._rows.get()) is not None:
            if exporter is None:
                self._lose(1, "")
                continue
            try:
                exporter.export(*row)
            except (Exception, SystemExit) as error:  # noqa: BLE001
                self._lose(1, f"it raised {type(error).__name__}: {error}")
        if exporter is not None:
            try:
                exporter.close()
            except (Exception, SystemExit) as error:  # noqa: BLE001
                self._lose(0, f"closing it raised {type(error).__name__}: {error}")

    def _lose(self, rows: int, why: str) -> None:
        self.lost += rows
        kind = why.partition(":")[0]
        if why and kind not in self._told:
            self._told.add(kind)
            _log.warning("exporter %s: %s; the run goes on, and rows that are lost to it are counted (%d)", self.name, why, self.lost)
