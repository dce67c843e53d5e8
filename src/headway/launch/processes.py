"""Child processes: started with a lifeline, known to be ready or known to have failed, and gone when they are told to go.

A child leads a session of its own: a Ctrl-C in the terminal reaches the orchestrator alone, and what the child starts is ended with it.
When the orchestrator dies, however it dies, the lifeline closes and the child ends itself (`headway.lifeline`). Its output goes to a log
file; errors quote the end of that file.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from headway.errors import ConfigError, HeadwayError, RunFailed
from headway.lifeline import VARIABLE

_LOG_LINES_SHOWN = 20
_SAID = "headway: "  # how the command line begins what it says on purpose
_LOG_BYTES_READ = 16_384
_KILL_SECONDS = 10.0  # a killed process that is not gone by then sits in the kernel: nothing more can be done
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def child_environment(*, threads: int = 0, extra: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the environment of a child: this process's, offline as to model hubs, unbuffered; `threads` 0: as libraries choose."""
    environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if threads:
        environment |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
    return environment | dict(extra)


class ChildProcess:
    """One supervised child. Made by `start`; to be ended by `stop`."""

    def __init__(
        self, name: str, process: Process, lifeline: asyncio.StreamReader, writer: asyncio.StreamWriter, log: Path, error: type[RunFailed]
    ) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._lifeline = lifeline
        self._writer = writer
        self._error = error
        self._stopping = False
        self._was_ready = False
        self._ended = asyncio.create_task(self._reap(), name=f"reap {name}")

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        error: type[RunFailed],
        threads: int = 0,
        environment: Mapping[str, str] = {},
    ) -> Self:
        """Start `command` with its output appended to `log`. `error` is the class that its failures are raised as.

        `threads` > 0 limits the math libraries of the child; `environment` is added to this process's.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            variables = child_environment(threads=threads, extra={**environment, VARIABLE: str(theirs.fileno())})
            starting = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *command,
                    stdin=DEVNULL,
                    stdout=output,
                    stderr=STDOUT,
                    env=variables,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            )
            try:
                process = await asyncio.shield(starting)
            except OSError as failure:
                ours.close()
                raise error(f"{name} could not be started: {command[0]}: {failure.strerror}") from failure
            except asyncio.CancelledError:  # a signal while everything starts: no process is left that nobody knows
                ours.close()
                process = await starting
                process.kill()
                await process.wait()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(name, process, reader, writer, log, error)

    @property
    def pid(self) -> int:
        """The process id, also that of its process group."""
        return self._process.pid

    async def ready(self, timeout_seconds: float) -> dict[str, Any]:
        """Wait until the child says that it serves, and return the facts it tells.

        Raises the child's error class when it ends first (noticed at once; ConfigError where it ends by one), or is not ready in time; the
        caller still has to `stop` it.
        """
        hello = asyncio.create_task(self._lifeline.readline(), name=f"hello of {self.name}")
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.wait({hello, self._ended}, return_when=asyncio.FIRST_COMPLETED)
                # A dying child may have written its line; one that closes the line without it is about to end.
                line = await hello if hello.done() or not self._ended.done() else b""
                if not line.endswith(b"\n"):
                    await asyncio.shield(self._ended)
                    raise self._failed("before it was ready")
        except TimeoutError:
            raise self._error(
                f"{self.name} was not ready within {timeout_seconds:g} s; its log: {self.log}", detail=self.last_log_lines()
            ) from None
        finally:
            hello.cancel()
        facts: dict[str, Any] = json.loads(line)
        self._was_ready = True
        return facts

    async def watch(self) -> None:
        """Wait for the end of the child, and raise its error class unless `stop` asked for that end."""
        await asyncio.shield(self._ended)
        if not self._stopping:
            raise self._failed("unexpectedly")

    def failure(self) -> str | None:
        """Return how the child ended, in one line; None while it runs, or when `stop` ended it."""
        return str(self._failed("unexpectedly")) if self._ended.done() and not self._stopping else None

    async def stop(self, grace_seconds: float) -> int:
        """End the child and all it started: SIGTERM, then SIGKILL after `grace_seconds`. Returns its exit code; idempotent."""
        self._stopping = True
        try:
            if not self._ended.done():
                self._signal(signal.SIGTERM)
                await asyncio.wait({self._ended}, timeout=grace_seconds)
        finally:
            self._signal(signal.SIGKILL)
            # Closed last: a child that still cleans up would take it for the orchestrator's death.
            self._writer.close()
        await asyncio.wait({self._ended}, timeout=_KILL_SECONDS)
        return self._process.returncode if self._process.returncode is not None else -signal.SIGKILL

    def last_log_lines(self) -> str:
        """Return the end of the child's log; empty when there is none."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES_READ))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.rstrip().splitlines()[-_LOG_LINES_SHOWN:])

    async def _reap(self) -> int:
        code = await self._process.wait()
        self._signal(signal.SIGKILL)  # what it started and left behind
        return code

    def _signal(self, number: signal.Signals) -> None:
        # The group's id cannot be another's while a member lives; PermissionError is how macOS reports a group of zombies.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _failed(self, when: str) -> HeadwayError:
        code = self._process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        lines = self.last_log_lines().splitlines()
        said = [number for number, line in enumerate(lines) if line.startswith(_SAID)]  # on purpose; below it may stand details
        line, below = (lines[said[-1]], lines[said[-1] + 1 :]) if said else (lines[-1] if lines else "", lines)
        cause = f": {line.removeprefix(_SAID).strip()}" if line.strip() else ""
        error = ConfigError if code == ConfigError.exit_code and not self._was_ready else self._error
        return error(f"{self.name} ended {when} ({how}){cause}; its log: {self.log}", detail="\n".join(below))
