"""A child process and all that it starts, as one group: started so that nothing is left that nobody knows, and swept when it has ended.

The child leads a session of its own: a Ctrl-C in the terminal reaches the orchestrator alone, and what the child starts is ended with it.
When the orchestrator dies, however it dies, the lifeline closes and the child ends itself (`headway.lifeline`). Its output goes to a log
file. What a child says and when it is ready is the business of who starts it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from headway.errors import StorageError
from headway.formats.bounded import open_regular, refuse_irregular
from headway.lifeline import VARIABLE, descendants, family, kill_found

_LIVING: set[ProcessGroup] = set()
_FAMILY = f"HEADWAY_FAMILY={os.getpid()}-{secrets.token_hex(8)}"  # handed down to whatever the children start
_LOG_LINES_SHOWN = 20
_LOG_BYTES_READ = 16_384
# Unbuffered: what the user's code prints is in the log at once, and not lost with a killed process.
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


class ProcessGroup:
    """One child with its descendants. `lifeline` is our end, the caller's to close; `ended` gives the exit code, once all are gone."""

    def __init__(self, name: str, process: Process, lifeline: socket.socket, log: Path, log_begins: int = 0) -> None:
        self.lifeline = lifeline
        self.log = log
        self._process = process
        self._log_begins = log_begins
        self._swept = False
        _LIVING.add(self)
        self.ended = asyncio.create_task(self._reap(), name=f"reap {name}")

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str] = {}, sockets: Sequence[socket.socket] = ()
    ) -> Self:
        """Start `command` with its output appended to `log`. Raises OSError; StorageError where that is no regular file.

        `environment` is added to this process's; the child inherits `sockets` under their numbers.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        refuse_irregular(log)
        ours, theirs = socket.socketpair()
        try:
            with theirs, log.open("ab") as output:
                log_begins = output.seek(0, os.SEEK_END)
                process = await _started(
                    *command,
                    stdin=DEVNULL,
                    stdout=output,
                    stderr=STDOUT,
                    env={**os.environ, **_ENVIRONMENT, **environment, **dict([_FAMILY.split("=")]), VARIABLE: str(theirs.fileno())},
                    pass_fds=(theirs.fileno(), *(each.fileno() for each in sockets)),
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        return cls(name, process, ours, log, log_begins)

    @property
    def pid(self) -> int:
        """The process id of the child, also that of its group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The child's exit code, -n where signal n ended it; None while it runs."""
        return self._process.returncode

    @property
    def killed_by(self) -> str:
        """The name of the signal that ended the child; empty when it ended by itself, or runs."""
        code = self._process.returncode
        return signal.Signals(-code).name if code is not None and code < 0 else ""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child and to what it has started; to those that have ended, nothing."""
        # Not after the sweep: by then the group's id may be another's. PermissionError is how macOS reports a group of zombies.
        if not self._swept:
            elsewhere = descendants(self._process.pid) if number == signal.SIGKILL else []  # in sessions of their own, too
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            for pid in elsewhere:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def last_log_lines(self) -> str:
        """Return the end of the log, as far as this child wrote it and not its predecessors; empty when there is none."""
        try:
            with open_regular(self.log) as file:
                file.seek(max(self._log_begins, file.seek(0, os.SEEK_END) - _LOG_BYTES_READ))
                text = file.read().decode(errors="replace")
        except (OSError, StorageError):
            return ""
        return "\n".join(text.rstrip().splitlines()[-_LOG_LINES_SHOWN:])

    async def _reap(self) -> int:
        code = await self._process.wait()
        self.signal(signal.SIGKILL)  # what it started and left behind
        self._swept = True
        _LIVING.discard(self)
        return code


def kill_all() -> None:
    """End all that is left of every group, at once and from any thread: for a process that is about to end, and whose event loop may hang.

    What children have started in sessions of their own, and left behind, is found by a variable that it has inherited (Linux).
    """
    for group in list(_LIVING):
        group.signal(signal.SIGKILL)
    kill_found(lambda: family(_FAMILY))


async def _started(*command: str, **options: Any) -> Process:
    """Start a process; cancelled meanwhile (a signal while everything starts), end it again."""
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, **options))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with suppress(OSError):
            process = await starting
            process.kill()
            await process.wait()
        raise
