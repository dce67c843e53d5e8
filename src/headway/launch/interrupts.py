"""SIGINT and SIGTERM while there is no run yet that could end in order: they stop what the main thread does, by an error with a name."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from headway.errors import HeadwayError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(HeadwayError):
    """A signal, or run.stop_before_seconds, stopped the run before it had drained."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(f"stopped by {what} before it had drained")
        self.exit_code = exit_code


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise Interrupted wherever the main thread is, in blocking user code too, until a run's end takes over."""
    seen: list[signal.Signals] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        seen.append(signal.Signals(number))
        raise stopped_by(seen[0])

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    except Exception as error:
        if not seen or isinstance(error, Interrupted):
            raise
        raise stopped_by(seen[0]) from error  # who was interrupted took it for an error of something that it called
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stopped_by(number: signal.Signals) -> Interrupted:
    """Return the error of a run that a signal has stopped."""
    return Interrupted(number.name, 128 + number)
