"""`python -m headway.cli.sweep_process`: simulates the points that it is asked for, one after the other, for a sweep that several share.

Questions come on standard input, answers go to standard output: frames of an 8-byte little-endian length and as much msgpack. It ends when
there are no more questions, and with who asks, however that one ends.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, TypeAlias

import msgspec

from headway.cli.simulate import simulated
from headway.errors import HeadwayError
from headway.lifeline import VARIABLE, guard
from headway.planning.draw_timeline import last_batches
from headway.sim.scenario import Scenario
from headway.sim.summary import Interval, Summary

LENGTH = struct.Struct("<Q")
_INTERVAL_SECONDS = 0.2


class Ask(msgspec.Struct, frozen=True):
    """A scenario to simulate. `timeline`: who was at what is wanted, too."""

    scenario: Scenario
    cohorts: bool
    timeline: bool


class Trained(msgspec.Struct, frozen=True, tag="trained"):
    """How many batches are trained by now."""

    batches: int


class Came(msgspec.Struct, frozen=True, tag="came"):
    """What a scenario came to."""

    summary: Summary
    intervals: Sequence[Interval]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Why a scenario has no figures, in a line."""

    problem: str


Answer: TypeAlias = Trained | Came | Failed


def frame(message: Ask | Answer) -> bytes:
    """Return a message as it goes over a pipe."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def answered(ask: Ask, tell: Callable[[Answer], None]) -> Came | Failed:
    """Simulate what is asked for; `tell` hears now and then how far that is."""
    told = time.monotonic()

    def progress(trained: int) -> None:
        nonlocal told
        if time.monotonic() - told > _INTERVAL_SECONDS:
            told = time.monotonic()
            tell(Trained(trained))

    try:
        summary, intervals = simulated(ask.scenario, progress, cohorts=ask.cohorts)
    except HeadwayError as error:
        return Failed(str(error).partition("\n")[0])
    return Came(summary, last_batches(intervals) if ask.timeline else ())


def serve(asks: BinaryIO, answers: BinaryIO) -> None:
    """Answer until nothing more is asked."""

    def tell(answer: Answer) -> None:
        answers.write(frame(answer))
        answers.flush()

    while head := asks.read(LENGTH.size):
        tell(answered(msgspec.msgpack.decode(asks.read(*LENGTH.unpack(head)), type=Ask), tell))


def main() -> None:
    """Serve on the pipes that this process was started with; what anybody prints goes to standard error."""
    guard(grace_seconds=0.0)
    os.environ.pop(VARIABLE, None)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
