"""What the keeper asks of the disks that a run writes to: how much is free, and to remove batch directories that are no longer needed."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from headway.errors import StorageError
from headway.formats.files import storage_errors, temporary_sibling
from headway.formats.hold import unheld
from headway.formats.run_directory import RunDirectory, numbered

_log = logging.getLogger("headway")


class Disks:
    """The disks that these directories lie on; they must exist when they are asked about."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = directories

    async def free_space(self) -> tuple[int, str]:
        """Return how many bytes are free where the fewest are, and the directory; raises StorageError when a disk does not answer.

        Asked in a thread: a mount that hangs holds nothing else up.
        """
        return await asyncio.to_thread(self._least)

    def _least(self) -> tuple[int, str]:
        return min((_free_bytes(directory), str(directory)) for directory in self._directories)


class BatchDirectories:
    """The batch directories of a run, as far as removing them goes."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    async def retire(self, before: int) -> None:
        """Remove the directories of batches below `before`, but those that somebody holds (`formats.hold`). Never raises for a disk."""
        await asyncio.to_thread(self._retire, before)

    def _retire(self, before: int) -> None:
        try:
            there = numbered(self._run.batches)
        except StorageError as error:
            _log.warning("old batches are not removed, will be tried again: %s", error)
            return
        for k in there:
            if k < before:
                _remove(self._run.batch(k))


def _free_bytes(directory: Path) -> int:
    with storage_errors(f"{directory}: does not say how much is free"):
        facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize


def _remove(directory: Path) -> None:
    """Remove a directory that nobody holds, under a name that nobody reads: what is half removed does not exist, nor can it be held."""
    temporary = temporary_sibling(directory)
    try:
        with unheld(directory) as free:
            if not free:
                return
            directory.rename(temporary)
        shutil.rmtree(temporary)  # without the lock: a network file system keeps a file that is open
    except OSError as error:
        _log.warning("%s: cannot be removed, will be tried again: %s", directory, error.strerror)
