"""Processes at a terminal: what they write there, read at the end that is ours, and the Ctrl-C that they hear."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def rest_of(terminal: int) -> bytes:
    """Read what is left, to its end, which is there once everybody has closed the other end; then close ours."""
    read = b""
    with suppress(OSError):  # EIO: how Linux tells the end
        while piece := os.read(terminal, 4096):
            read += piece
    os.close(terminal)
    return read


class Standing(io.StringIO):
    """In the place of sys.stderr: a terminal that stands still until somebody goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.goes_on = threading.Event()

    def write(self, text: str) -> int:
        self.asked.set()
        self.goes_on.wait()
        return super().write(text)


@contextmanager
def ctrl_c_is_heard() -> Iterator[None]:
    """Have processes that are started within the block begin as at a terminal, where SIGINT is not ignored.

    Whatever a script starts with `&` ignores it, and hands that down: to the tests as well, and to what they start.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
