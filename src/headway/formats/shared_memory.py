"""Where the versions of a run lie in memory that processes of this machine share: a directory in a tmpfs, files as anywhere else.

    /dev/shm/headway-<run id>/<version>/    the files of a version; the manifest, which offers them, lies on disk alone

Nobody but the run's user may enter it, and nothing is followed out of it. It belongs to the run's trainer: who starts as such removes what
a killed one has left (`clear`), and at the end nothing stays.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from pathlib import Path

from headway.errors import StorageError
from headway.formats.files import storage_errors

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the tmpfs itself is what is meant
_PREFIX = "headway-"
_TRIES = 3

_log = logging.getLogger("headway")


def is_available() -> bool:
    """Whether this machine has such memory."""
    return SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK | os.X_OK)


def memory_of(run_id: str) -> Path:
    """Return the directory of a run; it need not exist."""
    if not (run_id.isascii() and run_id.isalnum()):
        raise StorageError(f"a run with the id {run_id!r} can keep nothing in {SHARED_MEMORY}: ids are letters and digits")
    return SHARED_MEMORY / f"{_PREFIX}{run_id}"


def create(directory: Path) -> None:
    """Make a run's directory, for its user alone. Raises StorageError when somebody else's is in the way."""
    with storage_errors(f"{directory}: cannot be made"):
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            status = directory.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise StorageError(f"{directory}: is in the way and not this run's: remove it") from None


def clear(directory: Path) -> None:
    """Remove a run's directory with all versions in it; idempotent. What cannot be removed is told of."""
    for tries_left in reversed(range(_TRIES)):  # a thread of the trainer's may be writing there
        try:
            shutil.rmtree(directory)
        except FileNotFoundError:
            if not directory.exists():
                return
        except OSError as error:
            if not tries_left:
                _log.warning("%s: cannot be removed, it takes memory until it is: %s", directory, error.strerror or error)


def lies_there(text: str) -> bool:
    """Whether a path names a version of some run in this memory, and nothing else."""
    path = Path(text)
    named = path.parent.parent == SHARED_MEMORY and path.parent.name.startswith(_PREFIX) and path.name.isascii() and path.name.isdigit()
    return named and str(path) == text
