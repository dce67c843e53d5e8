"""The points of a sweep, several at once: processes that each simulate the next one that nobody has taken.

What a point comes to does not depend on who simulates it. A process that dies (out of memory, most likely) costs the point that it had.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import msgspec

from headway.cli.sweep_process import LENGTH, Answer, Ask, Came, Failed, Trained, frame
from headway.errors import RunFailed
from headway.lifeline import VARIABLE
from headway.planning.sweep import Outcome, Point

Found = Callable[[int, Outcome], None]


async def simulate_apart(
    points: Sequence[Point], jobs: int, *, cohorts: bool, timelines: int, found: Found, told: Callable[[int], None]
) -> None:
    """Simulate the points by so many processes. Cancelled: end them.

    `found` hears what each comes to and its number, as it comes; `told` how many batches all have trained. `timelines`: of so many points,
    the first that can be simulated, who was at what is kept.
    """
    asks = [(number, Ask(point.scenario, cohorts, timeline=False)) for number, point in enumerate(points) if point.scenario is not None]
    asks = [(number, msgspec.structs.replace(ask, timeline=rank < timelines)) for rank, (number, ask) in enumerate(asks)]
    for number, point in enumerate(points):
        if point.scenario is None:
            found(number, Outcome(point, None, point.problem))
    trained = dict.fromkeys((number for number, _ in asks), 0)

    def progress(number: int, batches: int) -> None:
        trained[number] = batches
        told(sum(trained.values()))

    def answered(number: int, answer: Came | Failed) -> None:
        if isinstance(answer, Failed):
            found(number, Outcome(points[number], None, answer.problem))
        else:
            found(number, Outcome(points[number], answer.summary, intervals=answer.intervals))

    left = iter(asks)
    async with asyncio.TaskGroup() as group:
        for _ in range(min(jobs, len(asks))):
            group.create_task(_simulator(left, progress, answered))


async def _simulator(
    left: Iterator[tuple[int, Ask]], progress: Callable[[int, int], None], answered: Callable[[int, Came | Failed], None]
) -> None:
    """Have a process simulate what is left, and another when that one has died."""
    child: _Child | None = None
    try:
        for number, ask in left:
            child = child or await _Child.start()
            answer = await child.asked(ask, lambda batches, number=number: progress(number, batches))  # type: ignore[misc]
            if answer is None:
                answer = Failed(f"the process that simulated it {await child.fate()}")
                await child.end()
                child = None
            progress(number, ask.scenario.run.steps)
            answered(number, answer)
    finally:
        if child is not None:
            await child.end()


class _Child:
    """One process with its pipes, and a lifeline by which it ends with us."""

    def __init__(self, process: Process, lifeline: socket.socket) -> None:
        self._process = process
        self._lifeline = lifeline

    @classmethod
    async def start(cls) -> _Child:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "headway.cli.sweep_process",
                    stdin=PIPE,
                    stdout=PIPE,
                    env={**os.environ, VARIABLE: str(theirs.fileno())},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # a Ctrl-C at the terminal is for us alone
                )
        except OSError as error:
            ours.close()
            raise RunFailed(f"a process to simulate points could not be started: {error.strerror}: lower --jobs") from error
        except BaseException:
            ours.close()
            raise
        return cls(process, ours)

    async def asked(self, ask: Ask, progress: Callable[[int], None]) -> Came | Failed | None:
        """Return what the child answers; None: it has died."""
        asks, answers = self._process.stdin, self._process.stdout
        assert asks is not None  # noqa: S101  both are pipes
        assert answers is not None  # noqa: S101
        try:
            asks.write(frame(ask))
            await asks.drain()
            while True:
                (length,) = LENGTH.unpack(await answers.readexactly(LENGTH.size))
                answer = msgspec.msgpack.decode(await answers.readexactly(length), type=Answer)
                if not isinstance(answer, Trained):
                    return answer
                progress(answer.batches)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def fate(self) -> str:
        """Return how the child ended, in words, once it has."""
        code = await self._process.wait()
        return f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"

    async def end(self) -> None:
        """End the child, if it has not ended."""
        self._lifeline.close()
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)  # its own `kill` may take the exit code away from who waits for it
        await self._process.wait()
