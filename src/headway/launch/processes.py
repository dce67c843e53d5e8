"""Engine and trainer as child processes: known to be ready or known to have failed, and gone when they are told to go.

How a child is started, dies with its parent and takes along what it has started: `headway.adapters.process_group`. Errors quote the end of
its log file.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from headway.adapters.process_group import ProcessGroup
from headway.errors import ConfigError, HeadwayError, RunFailed
from headway.secrecy import concealed

_CRASHED = ("Traceback (most recent", "headway has a bug")
_ERROR = re.compile(r"(Error|Exception|error)\b[^:]*: \S")  # `ValueError: no room`, `api_server.py: error: no such option`
_KIND = re.compile(r" \[[a-z]+\]$")
_SAID = "headway: "  # how the command line begins what it says on purpose
_KILL_SECONDS = 10.0  # a killed process that is not gone by then sits in the kernel: nothing more can be done
_ROOM_FOR_A_CAUSE = 64 * 1024  # bytes
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ChildProcess:
    """One supervised child. Made by `start`; to be ended by `stop`."""

    def __init__(
        self,
        name: str,
        group: ProcessGroup,
        lifeline: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        error: type[RunFailed],
        *,
        may_end: bool,
        foreign: bool,
    ) -> None:
        self.name = name
        self.log = group.log
        self.error = error
        self._group = group
        self._lifeline = lifeline
        self._writer = writer
        self._may_end = may_end
        self._foreign = foreign
        self._stopping = False
        self._was_ready = False

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        error: type[RunFailed],
        threads: int = 0,
        may_end: bool = False,
        foreign: bool = False,
        environment: Mapping[str, str] = {},
    ) -> Self:
        """Start `command`, offline as to model hubs, its output appended to `log`. `error` is the class that its failures are raised as.

        `threads` > 0 limits the math libraries of the child; 0: as they choose. `environment` is added to this process's, and wins.
        `may_end`: it ends by itself once its work is done, with exit code 0; whether the work is done is for others to see. `foreign`: a
        server that knows nothing of headway, whose exit code means nothing; its log is for this user alone, as it may tell its key.
        """
        variables = {"HF_HUB_OFFLINE": "1"} | (dict.fromkeys(_THREAD_VARIABLES, str(threads)) if threads else {}) | dict(environment)
        try:
            if foreign:
                _make_private(log)
            group = await ProcessGroup.start(name, command, log=log, environment=variables)
        except OSError as failure:
            raise error(f"{name} could not be started: {failure.filename or command[0]}: {failure.strerror}") from failure
        try:
            reader, writer = await asyncio.open_unix_connection(sock=group.lifeline)
        except BaseException:
            group.signal(signal.SIGKILL)
            group.lifeline.close()
            raise
        return cls(name, group, reader, writer, error, may_end=may_end, foreign=foreign)

    @property
    def pid(self) -> int:
        """The process id, also that of its process group."""
        return self._group.pid

    async def ready(self, timeout_seconds: float) -> dict[str, Any]:
        """Wait until the child says that it serves, and return the facts it tells.

        Raises the child's error class when it ends first (noticed at once; ConfigError where it ends by one), or is not ready in time; the
        caller still has to `stop` it.
        """
        hello = asyncio.create_task(self._lifeline.readline(), name=f"hello of {self.name}")
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.wait({hello, self._group.ended}, return_when=asyncio.FIRST_COMPLETED)
                # A dying child may have written its line; one that closes the line without it is about to end.
                line = await hello if hello.done() or not self._group.ended.done() else b""
                if not line.endswith(b"\n"):
                    await asyncio.shield(self._group.ended)
                    raise self._failed("before it was ready")
        except TimeoutError as late:
            raise self.error(f"{self.name} was not ready within {timeout_seconds:g} s; its log: {self.log}", detail=self._log_end) from late
        except ValueError as error:  # longer than a line may be
            raise self.error(f"{self.name} said something endless where it had to say that it is ready; its log: {self.log}") from error
        finally:
            hello.cancel()
        try:
            facts = dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise self.error(f"{self.name} said {line[:80]!r} where it had to say in JSON that it is ready; its log: {self.log}") from error
        self._was_ready = True
        return facts

    async def watch(self) -> None:
        """Wait for the end of the child, and raise its error class unless `stop` asked for that end, or it may end like this."""
        error = await self.death()
        if error is not None and not (self._may_end and self.exit_code == 0):
            raise error

    async def death(self) -> HeadwayError | None:
        """Wait for the end of the child, and return what it is to be told as; None: `stop` asked for it."""
        await asyncio.shield(self._group.ended)
        return None if self._stopping else self._failed("unexpectedly" if self._was_ready else "before it was ready")

    @property
    def exit_code(self) -> int | None:
        """The child's exit code, -n where signal n ended it; None while it runs."""
        return self._group.exit_code

    @property
    def stated(self) -> bool:
        """Whether the child has ended on purpose, as it would again: it said why, or could not (a full disk has no room for that)."""
        if self._foreign:
            return False
        lines = self._log_end.splitlines()
        crashed = any(line.startswith(_CRASHED) for line in lines)
        return any(line.startswith(_SAID) for line in lines) if crashed else self._group.exit_code in {1, 2, 3}

    async def stop(self, grace_seconds: float) -> int:
        """End the child and all it started: SIGTERM, then SIGKILL after `grace_seconds`. Returns its exit code; idempotent."""
        self._stopping = True
        try:
            self._group.signal(signal.SIGTERM)
            await asyncio.wait({self._group.ended}, timeout=grace_seconds)
        finally:
            self._group.signal(signal.SIGKILL)
            # Closed last: a child that still cleans up would take it for the orchestrator's death.
            self._writer.close()
        await asyncio.wait({self._group.ended}, timeout=_KILL_SECONDS)
        return -signal.SIGKILL if self._group.exit_code is None else self._group.exit_code

    @property
    def last_words(self) -> str:
        """The line that it has written last, without blanks around it; empty: none."""
        return next((line.strip() for line in reversed(self._log_end.splitlines()) if line.strip()), "")

    @property
    def _log_end(self) -> str:
        """The end of its log. Servers write down how they were started, keys included, and errors go to terminals and other logs."""
        return concealed(self._group.last_log_lines())

    def _telling(self, lines: Sequence[str]) -> str:
        """Return the line that tells most of an end: the last, of a foreign server the last that names an error."""
        errors = [line for line in lines if _ERROR.search(line)] if self._foreign else []
        return [*(lines or [""])[-1:], *errors][-1]

    def _failed(self, when: str) -> HeadwayError:
        code, killer = self._group.exit_code, self._group.killed_by
        how = f"killed by {killer}" if killer else f"exit code {code}"
        lines = self._log_end.splitlines()
        said = [number for number, line in enumerate(lines) if line.startswith(_SAID)]  # on purpose; below it may stand details
        line, below = (lines[said[-1]], lines[said[-1] + 1 :]) if said else (self._telling(lines), lines)
        cause = f": {_KIND.sub('', line.removeprefix(_SAID)).strip()}" if line.strip() else _no_room(self.log)
        error = ConfigError if code == ConfigError.exit_code and not self._was_ready else self.error
        return error(f"{self.name} ended {when} ({how}){cause}; its log: {self.log}", detail="\n".join(below))


def _make_private(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch(0o600)
    log.chmod(0o600)


def _no_room(log: Path) -> str:
    """Return the likely cause of an end that nothing is told of: a disk that is too full for the log has more than the log against it."""
    with suppress(OSError):
        if shutil.disk_usage(log.parent).free < _ROOM_FOR_A_CAUSE:
            return ": there was no room for its log: free space on the disk, then resume"
    return ""
