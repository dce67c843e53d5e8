"""What the person at the terminal is to know goes to the log and to stderr: one line, said in one way, and never at the run's expense.

Whoever starts and ends runs says `tell`. What is found out on the way, beside the path, is logged as `headway.engines`, `headway.trainer`,
`headway.workers` or `headway.metrics`: within `parts_told` that is printed, too, and so is what libraries log for want of a better place.
There a thread of its own prints: a terminal that stands still (Ctrl-S), or a pipe that nobody empties, must not hold up the run. What
it has no room for is lost to it and counted; events.log has what is headway's.
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
_TOLD = [logging.getLogger(f"headway.{part}") for part in ("engines", "trainer", "workers", "metrics")]
_MOST_WAITING = 256
_CLOSE_SECONDS = 2.0
_printers: list[_Printer] = []  # of the runs that this process plays now, the innermost last


def tell(text: str, *, level: int = logging.WARNING) -> None:
    """Log a line, and have it printed to stderr for whoever still reads there; within `parts_told`, this never waits for the terminal."""
    _log.log(level, "%s", text)
    show(f"headway: {text}")


def show(text: str) -> None:
    """Have a line printed as it is, and not logged; waits as `tell` does."""
    if _printers:
        _printers[-1].say(text)
    else:
        _print(text)


def tell_last(text: str) -> None:
    """Tell a line, and wait until it is printed: for a process that ends then. A terminal that stands still is waited for without end."""
    tell(text)
    if _printers:
        _printers[-1].wait()


@contextmanager
def parts_told() -> Iterator[None]:
    """Print what is logged of engines, trainer and workers within the block: that one joins, leaves, is lost or has died, is up again."""
    printer = _Printer()
    told, unheard = _Told(printer), _Unheard(printer)
    before, logging.lastResort = logging.lastResort, unheard
    for log in _TOLD:
        log.addHandler(told)
    _printers.append(printer)
    try:
        yield
    finally:
        _printers.remove(printer)
        for log in _TOLD:
            log.removeHandler(told)
        logging.lastResort = before
        printer.close()


class _Printer:
    """Prints lines in their order, by a thread of its own. Lines that wait for a terminal which stands still are bounded in number."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._lost = 0
        self._counting = threading.Lock()  # never held while anything is written
        self._over = threading.Event()
        threading.Thread(target=self._run, name="parts told", daemon=True).start()

    def say(self, text: str) -> None:
        """Have a line printed; never waits."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            with self._counting:
                self._lost += 1

    def wait(self) -> None:
        """Wait until all that was said is printed."""
        self._lines.join()

    def close(self) -> None:
        """Print what waits, if the terminal takes it in time; idempotent."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_SECONDS)
            self._over.wait(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            _print(line)
            if self._lines.empty():  # in its place: behind all that waited
                self._tell_of_lost()
            self._lines.task_done()
        self._tell_of_lost()
        self._lines.task_done()
        self._over.set()

    def _tell_of_lost(self) -> None:
        with self._counting:
            lost, self._lost = self._lost, 0
        if lost:
            _print(f"headway: {lost} lines are missing here, as nobody read: events.log has what was said")


class _Told(logging.Handler):
    """Has what is logged of a part printed, as one line."""

    def __init__(self, printer: _Printer) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(ConcealingFormatter("%(message)s"))
        self._printer = printer

    def emit(self, record: logging.LogRecord) -> None:
        """Have a line printed."""
        self._printer.say(f"headway: {' '.join(self.format(record).split())}")


class _Unheard(logging.Handler):
    """In the place of `logging.lastResort`, which would write to stderr itself what nobody handles: a library's warnings, as they are.

    What is headway's goes to events.log, and here where it is told.
    """

    def __init__(self, printer: _Printer) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(ConcealingFormatter("%(message)s"))
        self._printer = printer

    def emit(self, record: logging.LogRecord) -> None:
        """Have it printed, its traceback with it."""
        if record.name.partition(".")[0] != _log.name:
            self._printer.say(self.format(record))


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads there any more
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
