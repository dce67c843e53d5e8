"""One worker process: how it is started, what is under way in it, and how it ends.

It dies with its parent, and a kill reaches what the user's code has started as well (`headway.adapters.process_group`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import assert_never, cast

from headway.adapters.process_group import ProcessGroup
from headway.adapters.workers.moves import Moves
from headway.errors import ConfigError, WorkerFailed
from headway.formats.wire import (
    Alive,
    Failed,
    Finished,
    FrameReader,
    FromWorker,
    Hello,
    Move,
    Scored,
    Setup,
    ToWorker,
    WorkerSpec,
    decode_from_worker,
    encode_frame,
)
from headway.types import Failure

_log = logging.getLogger(__name__)
_told = logging.getLogger("headway.workers")  # told at the terminal, too (headway.launch.telling)
_SILENCE_SECONDS = 15.0

Answer = Finished | Failed | Scored


class Child(asyncio.Protocol):
    """A worker process and the wire to it.

    `calls` maps the number of each call under way to the future of its answer; `overdue` are calls that were cancelled, have used up their
    clean-up budget, and still run. A process that has any is `leaving`: it is sent no more calls, and ends when those under way are over.
    `moves` are those of its attempts, from engine to engine.
    """

    def __init__(self, name: str, group: ProcessGroup) -> None:
        self.name = name
        self.calls: dict[int, asyncio.Future[Answer]] = {}
        self.overdue: set[int] = set()
        self.moves = Moves(send=self.send, failed=self._fail_call)
        self.answered = 0
        self.ending = False
        self.leaving = asyncio.Event()
        self.heard = 0.0  # when it said something last, by the loop's clock
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._hello: asyncio.Future[Hello] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._silence: asyncio.TimerHandle | None = None

    @classmethod
    async def spawn(cls, name: str, spec: WorkerSpec, log: Path, start_timeout_seconds: float) -> Child:
        """Start a process and wait until it is ready. Raises `ConfigError` (the user's code), `WorkerFailed` (the process)."""
        wire, their_wire = socket.socketpair()
        try:
            with their_wire:
                command = (sys.executable, "-m", "headway.worker", "--wire", str(their_wire.fileno()))
                group = await ProcessGroup.start(name, command, log=log, sockets=(their_wire,))
        except OSError as error:
            wire.close()
            raise WorkerFailed(f"{name} could not be started: {error.strerror or error}") from error
        except BaseException:
            wire.close()
            raise
        child = cls(name, group)
        try:
            try:
                await child._loop.create_unix_connection(lambda: child, sock=wire)
            except BaseException:
                wire.close()
                raise
            child.send(Setup(spec))
            async with asyncio.timeout(start_timeout_seconds):
                hello = await child._hello
        except TimeoutError as late:
            await child.kill()
            raise WorkerFailed(f"{name} was not ready within {start_timeout_seconds:g} s; its log: {log}") from late
        except BaseException:
            await child.kill()
            raise
        if hello.error:
            await child.kill()
            raise ConfigError(hello.error, detail=hello.detail)
        return child

    @property
    def connected(self) -> bool:
        """Whether the process can still be told something."""
        return self._transport is not None

    def send(self, message: ToWorker) -> None:
        """Send a message; to a process that is gone, into the void: whoever waits for its answers is told by `wait`'s caller."""
        if self._transport is not None:
            self._transport.write(encode_frame(message))

    async def used_up(self) -> None:
        """Wait until the process has ended, or is to be replaced."""
        leaving = asyncio.create_task(self.leaving.wait())
        try:
            await asyncio.wait((self._group.ended, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()

    def overrun(self, call: int, *, cancelled: float) -> None:
        """A call that was cancelled at that time has not ended within its budget. One that said nothing since blocks: it is killed."""
        self.overdue.add(call)
        blocks = self.heard < cancelled
        if not self.leaving.is_set():
            what = "blocks in user code that was to end: it is killed" if blocks else "runs user code that was to end: it is to leave"
            _told.warning("%s %s, with %d other calls, and replaced; its log: %s", self.name, what, len(self.calls) - 1, self._group.log)
            self.leaving.set()
        if blocks:
            self._group.signal(signal.SIGKILL)

    def over(self, call: int) -> None:
        """A call is over, whatever became of it."""
        self.moves.refuse(call)
        self.calls.pop(call, None)
        if self.leaving.is_set() and not self.calls:
            self._group.signal(signal.SIGKILL)

    async def wait(self) -> str:
        """Wait for the process to end; return how it ended, for people."""
        code = await asyncio.shield(self._group.ended)
        killer = self._group.killed_by
        how = f"was ended by {killer}" if killer else f"ended with exit status {code}"
        return f"{self.name} (process {self._group.pid}) {how}; its log: {self._group.log}"

    async def kill(self) -> None:
        """End the process and all that it started, at once; idempotent. If cancelled meanwhile, everything is released first."""
        self.ending = True
        self._group.signal(signal.SIGKILL)
        cancelled = None
        while not self._group.ended.done():
            try:
                await asyncio.wait((self._group.ended,))
            except asyncio.CancelledError as error:
                cancelled = error
        if self._transport is not None:
            self._transport.abort()
        self._group.lifeline.close()
        if cancelled is not None:
            raise cancelled

    async def end(self, message: ToWorker, limit_seconds: float) -> None:
        """Ask the process to end by `message`, and kill it when it has not after `limit_seconds`."""
        self.ending = True
        self.send(message)
        await asyncio.wait((self._group.ended,), timeout=limit_seconds)
        if not self._group.ended.done():
            _log.warning("%s did not end within %g s and is killed; its log: %s", self.name, limit_seconds, self._group.log)
        await self.kill()

    def fail_calls(self, failure: Failure) -> None:
        """Answer every call under way with `failure`."""
        calls, self.calls = self.calls, {}
        for number, answer in calls.items():
            if not answer.done():
                answer.set_result(Failed(number, failure))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the wire."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Handle every message that is whole."""
        self.heard = self._loop.time()
        try:
            for body in self._reader.feed(data):
                self._handle(decode_from_worker(body))
        except WorkerFailed:
            _log.exception("%s speaks nonsense and is killed", self.name)
            self._group.signal(signal.SIGKILL)

    def connection_lost(self, exc: Exception | None) -> None:
        """A worker without a wire is of no use: its process is ended, unless it is ending by itself."""
        self._transport = None
        if self._silence is not None:
            self._silence.cancel()
        if not self._hello.done():
            self._hello.set_exception(WorkerFailed(f"{self.name} ended before it was ready; its log: {self._group.log}"))
        if not self.ending:
            self._group.signal(signal.SIGKILL)

    def _handle(self, message: FromWorker) -> None:
        match message:
            case Finished(call) | Failed(call) | Scored(call):
                self.answered += 1
                self.overdue.discard(call)
                answer = self.calls.pop(call, None)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case Move(call):
                if call in self.calls:
                    self.moves.ask(message)
            case Alive():
                self._watch_silence()
            case Hello():
                if self._hello.done():
                    raise WorkerFailed("it says hello a second time")
                self._hello.set_result(message)
            case _:
                assert_never(message)

    def _fail_call(self, call: int, error: BaseException) -> None:
        answer = self.calls.get(call)
        if answer is None or answer.done():
            raise error
        answer.set_exception(error)

    def _watch_silence(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        self._silence = self._loop.call_later(_SILENCE_SECONDS, self._report_silence)

    def _report_silence(self) -> None:
        _log.warning(
            "%s has said nothing for %g s while %d calls are under way: does the environment block (time.sleep, requests, heavy Python)? "
            "Use asyncio.to_thread for such code, or more environment.workers",
            *(self.name, _SILENCE_SECONDS, len(self.calls)),
        )
