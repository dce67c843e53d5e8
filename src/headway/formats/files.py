"""Durable files and strict JSON: the few moves that every format here needs.

A file that appears under its final name is whole and survives a machine crash. JSON never holds NaN or infinity. Failures of the operating
system become `StorageError`s that name the file and the remedy.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headway.errors import StorageError

TEMPORARY = ".tmp-"

_log = logging.getLogger("headway")

_MOUNT = "the disk, or the mount, has failed: check it, then resume"
_REMEDIES = {
    errno.ENOSPC: "free space on the disk, then resume",
    errno.EDQUOT: "raise the disk quota, then resume",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), then resume",
    errno.EROFS: "the file system is read-only: mount it for writing, or choose another directory",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EMFILE: "raise the limit on open files (ulimit -n), then resume",
    errno.EIO: _MOUNT,
    errno.ESTALE: _MOUNT,
    errno.ENOTCONN: _MOUNT,
    errno.ENODEV: _MOUNT,
    errno.EXDEV: "it lies on two file systems: a directory must be renamed within one",
}


@contextmanager
def storage_errors(action: str) -> Iterator[None]:
    """Turn an OSError inside into a StorageError that says what was being done, what happened and what to do."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the disk and the directory")
        raise StorageError(f"{action}: {error.strerror or error}: {remedy}") from error


def strict_json(value: Any) -> bytes:
    """Encode as indented JSON; raises ValueError for NaN and infinity, which JSON has no word for."""
    return json.dumps(msgspec.to_builtins(value), allow_nan=False, indent=2).encode() + b"\n"


def sync(path: Path) -> None:
    """Force a file's bytes, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe in a directory of somebody's is not waited for
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_sibling(final: Path) -> Path:
    """Return an unused name beside `final`, on the same file system: `.tmp-<name>-<random>`. Readers ignore such names."""
    return final.with_name(f"{TEMPORARY}{final.name}-{secrets.token_hex(4)}")


def remove_temporaries(directory: Path) -> None:
    """Remove what killed writers left directly in a directory (`temporary_sibling`). Only for the one process that owns it.

    What cannot be removed is in nobody's way: it is told of, and tried again at the next start.
    """
    for path in directory.glob(f"{TEMPORARY}*"):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s: left by a killed process, cannot be removed: %s", path, error.strerror)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that a reader, or a crash, finds the old content or the new one and never a part."""
    temporary = temporary_sibling(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)
