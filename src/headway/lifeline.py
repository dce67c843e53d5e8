"""The line between a parent and a child process: readiness one way, death both ways.

A parent gives each child one end of a socket pair (its number in HEADWAY_LIFELINE). The child writes one JSON line when it is ready; when
the other end closes, however the parent ended, the child ends too. No signal, no polling, no port.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

VARIABLE = "HEADWAY_LIFELINE"
_ENDED = 70
_PR_SET_CHILD_SUBREAPER = 36
_last: list[Callable[[], None]] = []


def at_last(call: Callable[[], None]) -> None:
    """Have `call` called, in some thread, before this process is ended for outliving its parent: busy, it cleans up nothing itself."""
    _last.append(call)


def _end() -> None:
    for call in _last:
        with suppress(Exception):  # nobody is left to be told
            call()
    os._exit(_ENDED)


def guard(*, grace_seconds: float = 5.0) -> None:
    """Do not outlive the parent by more than `grace_seconds`, whatever this process is busy with; without a parent, do nothing.

    For the time before `Lifeline.watch`, which may be long: imports, a model to load. Reads nothing from the line.
    """
    number = os.environ.get(VARIABLE, "")
    if not number:
        return
    end = socket.socket(fileno=os.dup(int(number)))

    def wait() -> None:
        try:
            if end.recv(1, socket.MSG_PEEK):
                return  # a parent that talks: not ours
        except OSError:
            pass
        time.sleep(grace_seconds)
        _end()

    threading.Thread(target=wait, name="lifeline guard", daemon=True).start()


def descendants(pid: int) -> list[int]:
    """Return the processes that `pid` has started, directly or not, as far as their parents live; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for number in _processes():
        with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            parent = int(Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(number)
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def adopt_orphans() -> None:
    """Be the parent of what descendants leave behind as they end, so that `descendants` finds it (Linux; elsewhere no effect)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_found(find: Callable[[], Iterable[int]]) -> None:
    """Send SIGKILL to whom `find` finds, until it finds nobody new: while somebody is looked for, he may start others."""
    killed: set[int] = set()
    while new := set(find()) - killed:
        for pid in new:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= new


def family(mark: str) -> list[int]:
    """Return the processes whose environment holds `mark` as they were started with it; empty where there is no /proc."""
    found = []
    for number in _processes():
        with suppress(OSError):  # somebody else's, or it has ended meanwhile
            if mark.encode() in Path(f"/proc/{number}/environ").read_bytes().split(b"\0"):
                found.append(number)
    return found


def _processes() -> list[int]:
    try:
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    except OSError:
        return []


class Lifeline:
    """A child's end of the line."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def from_environment(cls) -> Lifeline | None:
        """Return this process's lifeline, or None when nobody started it with one. Grandchildren do not inherit it."""
        number = os.environ.pop(VARIABLE, "")
        if not number:
            return None
        end = socket.socket(fileno=int(number))
        end.set_inheritable(False)
        return cls(end)

    def ready(self, **facts: Any) -> None:
        """Tell the parent that this process serves, and the facts it needs (a URL, a version)."""
        self._end.sendall(json.dumps(facts).encode() + b"\n")

    def watch(self, lost: Callable[[], None], *, grace_seconds: float = 5.0) -> None:
        """Call `lost` from a thread when the parent is gone, and end the process `grace_seconds` later whatever happens."""

        def wait() -> None:
            try:
                while self._end.recv(4096):
                    pass
            except OSError:
                pass
            killer = threading.Timer(grace_seconds, _end)
            killer.daemon = True
            killer.start()
            lost()

        threading.Thread(target=wait, name="lifeline", daemon=True).start()
