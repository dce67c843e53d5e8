"""The watched file of engine addresses (`engine.urls_file`): who is in it now, and again whenever that has changed.

A line is an address (`addresses`); blank lines, and lines that begin with #, are skipped. The file is read every second. A change counts
once two looks have found the same, so that a file that is being written is not taken for half of what it will be. A file that has vanished,
cannot be read or has a line that is no address changes nothing: what it said before goes on to hold, and a warning is given once.
"""

from __future__ import annotations

import asyncio
import logging
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from headway.adapters.engines.addresses import read_address
from headway.errors import StorageError
from headway.formats.bounded import read_bounded
from headway.secrecy import without_login
from headway.types import EngineAddress, EngineKind

POLL_SECONDS = 1.0
MAX_BYTES = 4 * 1024**2
_log = logging.getLogger("headway.engines")  # told at the terminal, too (headway.launch.telling)

Addresses = tuple[EngineAddress, ...]


def read_addresses(path: Path, default: EngineKind) -> Addresses:
    """Return the addresses in a file, each once, in its order. Raises ValueError, in one line that names file and line."""
    try:
        content = read_bounded(path, MAX_BYTES).removeprefix(BOM_UTF8)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except StorageError as error:
        raise ValueError(f"{path}: is no list of URLs: {error}") from None
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        before = (content[: error.start].decode() + "x").splitlines()  # x: the line that it stands in may be empty before it
        place, byte = len(before[-1][:-1].encode()) + 1, content[error.start]
        raise ValueError(f"{path}: line {len(before)} is no text in UTF-8: its byte {place} is {byte:#04x}") from None
    found: dict[str, EngineAddress] = {}
    for number, line in enumerate(text.splitlines(), 1):
        written = line.strip()
        if not written or written.startswith("#"):
            continue
        try:
            address = read_address(written, default)
        except ValueError as error:
            raise ValueError(f"{path}: line {number} is no engine's URL: {error}") from None
        if without_login(address.url) != address.url:
            raise ValueError(f"{path}: line {number} has a login in it, which only engine.urls may have: use engine.api_key_variable")
        if found.setdefault(address.url, address) != address:
            raise ValueError(f"{path}: line {number} names an engine for the second time, as another kind: remove one of the two")
    return tuple(found.values())


class UrlsFile:
    """Who is in the file: iterate to be told at once, and again each time that it has changed. One reader at a time."""

    def __init__(
        self,
        path: Path,
        default: EngineKind,
        *,
        poll_seconds: float = POLL_SECONDS,
        read: Callable[[Path, EngineKind], Addresses] = read_addresses,
    ) -> None:
        self._read = read
        self._path = path
        self._default = default
        self._poll_seconds = poll_seconds
        self._warned = ""

    async def __aiter__(self) -> AsyncIterator[Addresses]:
        """Yield the addresses, for ever."""
        told: Addresses | None = None
        before: Addresses | None = None
        while True:
            now = await self._look()
            if told is None or (now is not None and now == before != told):
                told = now or ()
                yield told
            before = now
            await asyncio.sleep(self._poll_seconds)

    async def _look(self) -> Addresses | None:
        """Return what the file says; None: nothing that can be used."""
        try:
            found = await asyncio.to_thread(self._read, self._path, self._default)
        except ValueError as error:
            if str(error) != self._warned:
                self._warned = str(error)
                _log.warning("%s; the engines stay those that it named before (engine.urls_file)", error)
            return None
        self._warned = ""
        return found
