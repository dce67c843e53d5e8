"""Holds: who loads or serves a published directory keeps it from being removed, with a shared `flock` on its manifest.

The kernel gives a hold up with its process, however that ends. Whoever retires directories takes the lock exclusively first and leaves one
that is held for later (`is_held`). A directory without a manifest (a model of the user's) is nobody's to remove, and needs no hold.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from headway.formats.manifest import NAME


class Hold:
    """A directory that stays, until `release`."""

    def __init__(self, directory: Path) -> None:
        try:
            descriptor = os.open(directory / NAME, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._descriptor: int | None = None
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # it is being removed this moment, or the file system has no locks: loading it will tell
            os.close(descriptor)
            self._descriptor = None
            return
        self._descriptor = descriptor

    def release(self) -> None:
        """Let the directory go; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def is_held(directory: Path) -> bool:
    """Whether another process holds the directory. A file system that cannot say counts as held: keeping is the safe answer."""
    try:
        with (directory / NAME).open("rb") as manifest:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
