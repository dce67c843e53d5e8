"""Payload segments: append-only files of rollout records, `segments/000001.rollouts`, `000002`, ...

    file    = "HWSEG" 0x00, format version uint16, then records, little-endian
    record  = length uint32 of the data, CRC-32 uint32 of the data, sequence number uint64, data

Sequence numbers count records over all segments from 1. A record is durable (fdatasync) before anyone may refer to it; whatever lies behind
the last reference was never counted on, so opening cuts it away. Damage below it is never cut away: it is refused. Used by one thread.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from headway.errors import StorageError
from headway.formats.files import storage_errors, sync
from headway.types import PayloadReference

FORMAT_VERSION = 1
SEGMENT_BYTES = 256 * 1024 * 1024

_MAGIC = b"HWSEG\0" + struct.pack("<H", FORMAT_VERSION)
_RECORD = struct.Struct("<IIQ")
_BUFFERS_PER_CALL = 512  # below the kernel's IOV_MAX of 1024


class Segments:
    """The segment files of one journal, positioned behind the last record referred to."""

    def __init__(self, directory: Path, *, last: PayloadReference | None, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._readers: dict[int, int] = {}
        with storage_errors(f"{directory}: cannot be opened"):
            directory.mkdir(parents=True, exist_ok=True)
            self._number = last.segment if last else 1
            self._sequence = self._check_last(last) if last else 0
            for path in directory.glob("*.rollouts"):
                if path.stem.isdigit() and int(path.stem) > self._number:
                    path.unlink()  # begun, and never referred to before the process ended
            self._end = last.offset + last.length if last else 0
            self._file = self._open_at_end()

    def path(self, number: int) -> Path:
        """Return the file of a segment."""
        return self._directory / f"{number:06d}.rollouts"

    def append(self, records: Sequence[bytes]) -> list[PayloadReference]:
        """Write records and return where they lie; durable on return. After an error nothing more may be appended."""
        references: list[PayloadReference] = []
        buffers: list[bytes] = []
        with storage_errors(f"{self.path(self._number)}: rollouts cannot be written"):
            for data in records:
                if self._end >= self._segment_bytes:
                    self._flush(buffers)
                    self._roll_over()
                self._sequence += 1
                checksum, length = zlib.crc32(data), _RECORD.size + len(data)
                buffers += (_RECORD.pack(len(data), checksum, self._sequence), data)
                references.append(PayloadReference(self._number, self._end, length, checksum))
                self._end += length
            self._flush(buffers)
        return references

    def read(self, reference: PayloadReference) -> bytes:
        """Return the data of a record; raises StorageError unless it lies there whole and unchanged."""
        path = self.path(reference.segment)
        with storage_errors(f"{path}: cannot be read"):
            file = self._readers.get(reference.segment)
            if file is None:
                file = self._readers[reference.segment] = os.open(path, os.O_RDONLY)
            record = os.pread(file, reference.length, reference.offset)
        data = record[_RECORD.size :]
        if len(record) != reference.length or _RECORD.unpack_from(record)[:2] != (len(data), reference.checksum):
            raise self._damaged(reference, "is cut short or garbled")
        if zlib.crc32(data) != reference.checksum:
            raise self._damaged(reference, "does not match its checksum")
        return data

    def close(self) -> None:
        """Release the files; idempotent."""
        for file in self._readers.values():
            os.close(file)
        self._readers.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _damaged(self, reference: PayloadReference, how: str) -> StorageError:
        where = f"{self.path(reference.segment)}: the record at byte {reference.offset}"
        return StorageError(f"{where} {how}: the file is damaged, restore the state directory from a backup or start another run")

    def _check_last(self, last: PayloadReference) -> int:
        """Check that the last record referred to is there and sane; return its sequence number."""
        path = self.path(last.segment)
        if not path.exists():
            raise StorageError(f"{path}: is missing, but the journal refers to it: restore the state directory or start another run")
        data = self.read(last)
        file = self._readers[last.segment]
        if os.pread(file, len(_MAGIC), 0) != _MAGIC:
            raise StorageError(f"{path}: is no segment of version {FORMAT_VERSION}: restore the state directory or start another run")
        sequence: int = _RECORD.unpack(os.pread(file, last.length - len(data), last.offset))[2]
        return sequence

    def _open_at_end(self) -> int:
        """Open the current segment for appending; cut away what lies behind the last record referred to, or begin the file."""
        file = os.open(self.path(self._number), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.ftruncate(file, self._end)
            if not self._end:
                self._end = os.write(file, _MAGIC)
            os.fsync(file)
            sync(self._directory)
        except BaseException:
            os.close(file)
            raise
        return file

    def _roll_over(self) -> None:
        os.close(self._file)
        self._file = -1
        self._number += 1
        self._end = 0
        self._file = self._open_at_end()

    def _flush(self, buffers: list[bytes]) -> None:
        """Write the buffers in order and force them to the disk."""
        if not buffers:
            return
        for start in range(0, len(buffers), _BUFFERS_PER_CALL):
            part = buffers[start : start + _BUFFERS_PER_CALL]
            written, wanted = os.writev(self._file, part), sum(map(len, part))
            while written < wanted:  # a signal or a nearly full disk cut the call short
                written += os.write(self._file, memoryview(b"".join(part))[written:])
        _sync_data(self._file)
        buffers.clear()


_sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has only the stronger one
