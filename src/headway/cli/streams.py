"""The standard streams as a command finds them: closed, full, or read by something that has gone (`| head -1`)."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

from headway.errors import HeadwayError


def open_missing() -> None:
    """Open those of the three that are closed on the null device: the next file or socket would get a missing one's number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, and all before this one are open
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - open while the process is


def say(text: str) -> None:
    """Print what a command was asked for. Raises HeadwayError where it cannot be written; SystemExit where nobody reads any more."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise SystemExit(1) from None
    except OSError as error:
        raise HeadwayError(f"standard output cannot be written: {error.strerror}") from None


def leave_nothing_unwritten() -> None:
    """Write what is buffered, and drop what cannot be written: the interpreter would complain about it once everything is over."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def leave_within(seconds: float, code: int) -> None:
    """End this process with `code` in `seconds`, whatever threads of somebody's still hang then. For the end of a command line only."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
