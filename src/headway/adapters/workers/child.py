"""One worker process: how it is started, what is under way in it, and how it ends.

The process dies with its parent (its lifeline closes) and leads a session of its own, so that a terminal's Ctrl-C reaches the parent alone
and a kill reaches what the user's code has started as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path
from typing import Any, assert_never, cast

from headway.errors import ConfigError, WorkerFailed
from headway.formats.wire import (
    Alive,
    Failed,
    Finished,
    FrameReader,
    FromWorker,
    Hello,
    Scored,
    Setup,
    ToWorker,
    WorkerSpec,
    decode_from_worker,
    encode_frame,
)
from headway.lifeline import VARIABLE
from headway.types import Failure

_log = logging.getLogger(__name__)
_SILENCE_SECONDS = 15.0

Answer = Finished | Failed | Scored


class Child(asyncio.Protocol):
    """A worker process and the wire to it. `calls` maps the number of each call under way to the future of its answer."""

    def __init__(self, name: str, log: Path, process: Process, lifeline: socket.socket) -> None:
        self.name = name
        self.calls: dict[int, asyncio.Future[Answer]] = {}
        self.answered = 0
        self.ending = False
        self._log = log
        self._process = process
        self._lifeline = lifeline
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._hello: asyncio.Future[Hello] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._swept = False

    @classmethod
    async def spawn(cls, name: str, spec: WorkerSpec, log: Path, start_timeout_seconds: float) -> Child:
        """Start a process and wait until it is ready. Raises `ConfigError` (the user's code), `WorkerFailed` (the process)."""
        wire, their_wire = socket.socketpair()
        lifeline, their_lifeline = socket.socketpair()
        try:
            with their_wire, their_lifeline, log.open("ab") as output:
                numbers = (their_wire.fileno(), their_lifeline.fileno())
                process = await _started(
                    *(sys.executable, "-m", "headway.worker", "--wire", str(numbers[0])),
                    pass_fds=numbers,
                    # Unbuffered: what the user's code prints is in the log at once, and not lost with a killed process.
                    env={**os.environ, VARIABLE: str(numbers[1]), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"},
                    stdin=DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except BaseException:
            wire.close()
            lifeline.close()
            raise
        child = cls(name, log, process, lifeline)
        try:
            try:
                await child._loop.create_unix_connection(lambda: child, sock=wire)
            except BaseException:
                wire.close()
                raise
            child.send(Setup(spec))
            async with asyncio.timeout(start_timeout_seconds):
                hello = await child._hello
        except TimeoutError:
            await child.kill()
            raise WorkerFailed(f"{name} was not ready within {start_timeout_seconds:g} s; its log: {log}") from None
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

    async def wait(self) -> str:
        """Wait for the process to end; return how it ended, for people."""
        code = await self._reaped()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return f"{self.name} (process {self._process.pid}) {how}; its log: {self._log}"

    async def kill(self) -> None:
        """End the process and all that it started, at once; idempotent."""
        self.ending = True
        if self._process.returncode is None:
            self._signal(signal.SIGKILL)
        await self._reaped()
        self._release()

    async def end(self, message: ToWorker, limit_seconds: float) -> None:
        """Ask the process to end by `message`, and kill it when it has not after `limit_seconds`."""
        self.ending = True
        self.send(message)
        try:
            async with asyncio.timeout(limit_seconds):
                await self._reaped()
        except TimeoutError:
            _log.warning("%s did not end within %g s and is killed; its log: %s", self.name, limit_seconds, self._log)
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
        try:
            for body in self._reader.feed(data):
                self._handle(decode_from_worker(body))
        except WorkerFailed:
            _log.exception("%s speaks nonsense and is killed", self.name)
            if self._process.returncode is None:
                self._signal(signal.SIGKILL)

    def connection_lost(self, exc: Exception | None) -> None:
        """A worker without a wire is of no use: its process is ended, unless it is ending by itself."""
        self._transport = None
        if self._silence is not None:
            self._silence.cancel()
        if not self._hello.done():
            self._hello.set_exception(WorkerFailed(f"{self.name} ended before it was ready; its log: {self._log}"))
        if not self.ending and self._process.returncode is None:
            self._signal(signal.SIGKILL)

    def _handle(self, message: FromWorker) -> None:
        match message:
            case Finished(call) | Failed(call) | Scored(call):
                self.answered += 1
                answer = self.calls.pop(call, None)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case Alive():
                self._watch_silence()
            case Hello():
                self._hello.set_result(message)
            case _:
                assert_never(message)

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

    async def _reaped(self) -> int:
        """Wait for the process to end, and end at once what it started and left behind."""
        code = await self._process.wait()
        if not self._swept:
            self._swept = True  # once: later the group's id may be another's
            self._signal(signal.SIGKILL)
        return code

    def _signal(self, number: int) -> None:
        # It leads its session, and so its group. PermissionError is how macOS reports a group of zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _release(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._lifeline.close()


async def _started(*command: str, **options: Any) -> Process:
    """Start a process; cancelled meanwhile, end it again: no process is left that nobody knows."""
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, **options))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        process = await starting
        process.kill()
        await process.wait()
        raise
