"""What the person at the terminal is to know goes to the log and to stderr: one line, said in one way.

Whoever starts and ends runs says `tell`. What is found out on the way, beside the path, is logged as `headway.engines`, `headway.trainer`
or `headway.workers`: within `parts_told` that is printed, too, by a thread of its own, as a terminal that stands still must not hold up
the run.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from headway.secrecy import ConcealingFormatter

_log = logging.getLogger("headway")
_TOLD = [logging.getLogger(f"headway.{part}") for part in ("engines", "trainer", "workers")]
_MOST_WAITING = 256
_CLOSE_SECONDS = 2.0


def tell(text: str, *, level: int = logging.WARNING) -> None:
    """Log a line, and print it to stderr for whoever still reads there."""
    _log.log(level, "%s", text)
    _print(text)


@contextmanager
def parts_told() -> Iterator[None]:
    """Print what is logged of engines, trainer and workers within the block: that one joins, leaves, is lost or has died, is up again."""
    printer = _Printer()
    for log in _TOLD:
        log.addHandler(printer)
    try:
        yield
    finally:
        for log in _TOLD:
            log.removeHandler(printer)
        printer.close()


class _Printer(logging.Handler):
    """Prints lines in their order. Those that a terminal which stands still has no room for are lost to it; events.log has them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(ConcealingFormatter("%(message)s"))
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="parts told", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Have a line printed."""
        with suppress(queue.Full):
            self._lines.put_nowait(" ".join(self.format(record).split()))

    def close(self) -> None:
        """Print what waits, if the terminal takes it; idempotent."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)
        super().close()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            _print(line)


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads there any more
        print(f"headway: {text}", file=sys.stderr, flush=True)  # noqa: T201  for the person at the terminal
