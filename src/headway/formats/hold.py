"""Holds: who loads or serves a published directory keeps it from being removed, with a shared `flock` on its manifest.

The kernel gives a hold up with its process, however that ends. Whoever retires directories takes the lock exclusively first, has it until
the directory is gone, and leaves one that is held for later (`unheld`). A directory without a manifest (a model of the user's) is nobody's
to remove, and needs no hold.

`alone` is for who must be the only one of its kind: a trainer whose orchestrator was killed finishes its commit, and the next one waits.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.errors import StorageError
from headway.formats.bounded import open_descriptor
from headway.formats.files import storage_errors
from headway.formats.manifest import NAME

PREDECESSOR_SECONDS = 30.0  # for who held a lock before and is about to end: more than any child outlives its parent by
_LOOK_SECONDS = 0.05
_TRIES = 50
_TRY_SECONDS = 0.001  # who only asks has the lock for far less


class Hold:
    """A directory that stays, until `release`. Waits a moment, at most 50 ms, where somebody asks just then whether it is held."""

    def __init__(self, directory: Path) -> None:
        self._descriptor: int | None = None
        for _ in range(_TRIES):
            try:
                descriptor = open_descriptor(directory / NAME)
            except (StorageError, OSError):  # there is none, or none that can be read: loading the directory will tell
                return
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), (directory / NAME).stat()):  # otherwise it was removed meanwhile
                    self._descriptor = descriptor
                    return
            except BlockingIOError:
                time.sleep(_TRY_SECONDS)
            except OSError:  # it is gone, or the file system has no locks: loading it will tell
                return
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def release(self) -> None:
        """Let the directory go; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def unheld(directory: Path) -> Iterator[bool]:
    """Say whether nobody holds the directory, and let nobody begin to within the block, in which it may be removed.

    A file system that cannot say counts as held: keeping is the safe answer.
    """
    try:
        descriptor = open_descriptor(directory / NAME)
    except (FileNotFoundError, StorageError):  # nobody can have held what is no file
        yield True
        return
    except OSError:
        yield False
        return
    try:
        yield _is_free(descriptor)
    finally:
        os.close(descriptor)


def is_held(directory: Path) -> bool:
    """Whether another process holds the directory, or may."""
    with unheld(directory) as free:
        return not free


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def alone(lock: Path, *, seconds: float = PREDECESSOR_SECONDS, stopped: Callable[[], bool] = lambda: False) -> Iterator[bool]:
    """Hold a lock that one process at a time has, within the block; who has it yet gets `seconds` to end. Blocks; raises StorageError.

    Yields True; False when `stopped` came true before the lock was had.
    """
    with storage_errors(f"{lock}: cannot be opened"):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        due = time.monotonic() + seconds
        while not (had := _locked(descriptor, lock)) and not stopped():
            if time.monotonic() > due:
                raise StorageError(f"{lock}: another process holds it, for {seconds:g} s by now: end that one first")
            time.sleep(_LOOK_SECONDS)
        yield had
    finally:
        os.close(descriptor)


def _locked(descriptor: int, lock: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            return False
        raise StorageError(f"{lock}: cannot be locked: {error.strerror}: choose a file system with locks for run.directory") from error
    return True
