"""The processes and directories of a run as faults find them: by the process table (/proc) and by the run directory's contract."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

from headway.formats.manifest import read_manifest
from headway.formats.run_directory import RunDirectory, numbered

_WORDS = {"engine": ("headway", "engine"), "trainer": ("headway", "trainer"), "worker": ("headway.worker",)}


def children(parent: int, target: str) -> list[int]:
    """Return the processes of this kind that the orchestrator has started, by process id."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            after_name = (process / "stat").read_text().rpartition(")")[2].split()
            command = (process / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            if int(after_name[1]) == parent and after_name[0] != "Z" and _is(command, _WORDS[target]):
                found.append(int(process.name))
    return sorted(found)


def _is(command: list[str], words: tuple[str, ...]) -> bool:
    """Whether a command line is `... -m WORDS ...`, or `.../headway WORD ...`."""
    for at in range(len(command) - len(words) + 1):
        first, *rest = command[at : at + len(words)]
        if (first == words[0] or Path(first).name == words[0]) and tuple(rest) == words[1:]:
            return True
    return False


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; returns whether the process was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def newest_version(run: RunDirectory) -> int | None:
    """Return the newest complete version, if there is one above 0."""
    complete = (version for version in reversed(numbered(run.weights)) if version and read_manifest(run.weight(version)) is not None)
    return next(complete, None)


def hide(run: RunDirectory, version: int, place: Path) -> Path | None:
    """Take a version's directory away; returns where it is, None when it went by itself meanwhile."""
    place.mkdir(parents=True, exist_ok=True)
    hidden = place / f"{version:08d}-{os.urandom(3).hex()}"
    with suppress(FileNotFoundError):
        run.weight(version).rename(hidden)
        return hidden
    return None


def give_back(run: RunDirectory, version: int, hidden: Path) -> bool:
    """Put a version back; returns False, and removes it, when there is another by now."""
    if not run.weight(version).exists():
        try:
            hidden.rename(run.weight(version))
        except OSError:
            if not run.weight(version).exists():  # made again in this very moment, otherwise
                raise
        else:
            return True
    delete(hidden)
    return False


def delete(hidden: Path) -> None:
    """Remove a version that was taken away: it may be as large as a disk has room for."""
    shutil.rmtree(hidden, ignore_errors=True)
