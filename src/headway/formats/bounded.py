"""Files and JSON that another program has written, read so that they can do no harm: no more bytes than allowed, no endless nesting.

A file that never ends (a device), never answers (a pipe without a writer) or is larger than anything of its kind is refused by name. JSON
that is nested too deep for a parser that recurses is malformed, and says so.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headway.errors import StorageError

LONGEST_QUOTE = 300
T = TypeVar("T")


def read_bounded(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file. Raises StorageError when it is none, or has more than `most` bytes; OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without O_NONBLOCK, opening a pipe waits for its writer
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StorageError(f"{path}: is no regular file: remove it")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(most + 1)
    finally:
        os.close(descriptor)
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
