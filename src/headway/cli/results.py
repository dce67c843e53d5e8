"""The directory that `--out` names: new or empty, and each file in it whole; and lines on stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from headway.errors import ConfigError


def make(directory: Path) -> None:
    """Make the directory of results before anything takes time; one that holds something stays as it is."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise ConfigError(f"--out: {directory} is not empty, and nothing is overwritten: name another directory, or remove it")
    except OSError as error:
        raise ConfigError(f"--out: {directory} cannot be made: {error.strerror}: name another directory") from None


def write_files(directory: Path, contents: Mapping[str, bytes]) -> None:
    """Write files by their names. Raises StorageError."""
    from headway.formats.files import storage_errors, write_atomically

    for name, data in contents.items():
        with storage_errors(f"{directory / name}: cannot be written"):
            write_atomically(directory / name, data)


def tell(line: str) -> None:
    """Tell something beside the results."""
    with suppress(OSError):
        print(f"headway: {line}", file=sys.stderr)
