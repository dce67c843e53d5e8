"""Files and JSON that another program has written, read so that they can do no harm: no more bytes than allowed, no endless nesting.

A file that never ends (a device), never answers (a pipe without a writer) or is larger than anything of its kind is refused by name. JSON
that is nested too deep for a parser that recurses is malformed, and says so. Whatever somebody else may have put where a file should be is
opened by `open_regular`; where a library opens it by its path, `refuse_irregular` looks at it first.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headway.errors import StorageError

LONGEST_QUOTE = 300
_LOADED = frozenset({".safetensors", ".json", ".jinja", ".model", ".txt"})
T = TypeVar("T")


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to be read. Raises StorageError when it is none, and does not wait then; OSError."""
    return open(open_descriptor(path), "rb")


def open_descriptor(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file, which is made where `flags` say so. Raises as `open_regular`."""
    try:
        # without O_NONBLOCK, opening a pipe waits for whoever has its other end
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, a pipe that nobody reads, a device that is not there
            raise _irregular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _irregular(path)
    return descriptor


def refuse_irregular(path: Path) -> None:
    """Raise StorageError when something lies there that would be waited for, or never ends: neither a file nor a directory."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise _irregular(path)


def refuse_irregular_in(directory: Path) -> None:
    """Raise StorageError when something that loaders of models open by its name is no regular file; OSError."""
    for path in sorted(directory.iterdir()):
        if path.suffix in _LOADED:
            refuse_irregular(path)


def _irregular(path: Path) -> StorageError:
    return StorageError(f"{path}: is no regular file: remove it")


def read_regular(path: Path) -> bytes:
    """Return the bytes of a regular file, as many as there are. Raises as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def read_bounded(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file. Raises StorageError when it is none, or has more than `most` bytes; OSError."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise StorageError(f"{path}: has more than {most} bytes, which no such file has: remove it")
    return data


def brief(error: Exception) -> str:
    """Return what a parser says as one short line: it quotes what it was given."""
    line = " ".join(str(error)[: 2 * LONGEST_QUOTE].split())
    return line if len(line) <= LONGEST_QUOTE else line[:LONGEST_QUOTE] + "..."


def decode_json(data: bytes, type: type[T] | Any = Any) -> T:  # noqa: A002 -- msgspec's word
    """Decode strict JSON (no NaN). Raises msgspec.DecodeError for anything else, too deep nesting included."""
    try:
        value: T = msgspec.json.decode(data, type=type)
    except RecursionError as error:
        raise msgspec.DecodeError("JSON is nested too deep") from error
    return value
