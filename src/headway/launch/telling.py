"""What the person at the terminal is to know goes to the log and to stderr: one line, said in one way."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

_log = logging.getLogger("headway")


def tell(text: str, *, level: int = logging.WARNING) -> None:
    """Log a line, and print it to stderr for whoever still reads there."""
    _log.log(level, "%s", text)
    with suppress(OSError):
        print(f"headway: {text}", file=sys.stderr, flush=True)  # noqa: T201  for the person at the terminal
