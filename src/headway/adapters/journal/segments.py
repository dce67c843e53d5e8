"""Payload segments: append-only files of rollout records, `segments/000001.rollouts`, `000002`, ...

    file    = "HWSEG" 0x00, format version uint16, then records, little-endian
    record  = length uint32 of the data, CRC-32 uint32 of sequence number and data, sequence number uint64, data

Sequence numbers count records over all segments from 1. A record is durable (fdatasync) before anyone may refer to it; whatever lies behind
the last reference was never counted on, so opening cuts it away. Damage below it is never cut away: it is refused. A segment is removed
whole, once none of its groups is needed; the one that is being written never is. Used by one thread.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from headway.adapters.journal.group_numbers import GroupNumbers
from headway.errors import StorageError
from headway.formats.bounded import open_descriptor, open_regular
from headway.formats.files import storage_errors, sync
from headway.types import PayloadReference

FORMAT_VERSION = 2
SEGMENT_BYTES = 256 * 1024 * 1024

_MAGIC = b"HWSEG\0" + struct.pack("<H", FORMAT_VERSION)
_RECORD = struct.Struct("<IIQ")
_SEQUENCE = struct.Struct("<Q")
_BUFFERS_PER_CALL = 512  # below the kernel's IOV_MAX of 1024
_OPEN_TO_READ = 16  # segments: a run that keeps all of its rollouts has more of them than a process may have files
_RESTORE = "restore the state directory from a backup or start another run"

_log = logging.getLogger("headway")


@dataclass(slots=True)
class Content:
    """What a segment holds as far as anybody refers to it: where that ends, and whose rollouts they are."""

    end: int = 0
    groups: GroupNumbers = field(default_factory=GroupNumbers)


class SegmentIndex:
    """What the segments hold, by number, from the references of a history in order."""

    def __init__(self) -> None:
        self.contents: dict[int, Content] = {}
        self.last: PayloadReference | None = None

    def add(self, group: int, reference: PayloadReference) -> None:
        """Take in one more record."""
        content = self.contents.get(reference.segment)
        if content is None:
            content = self.contents[reference.segment] = Content()
        content.end = max(content.end, reference.offset + reference.length)
        content.groups.add(group)
        self.last = reference


class Segments:
    """The segment files of one journal, positioned behind the last record referred to."""

    def __init__(
        self, directory: Path, *, index: SegmentIndex, pruned: AbstractSet[int] = frozenset(), segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._readers: dict[int, int] = {}  # descriptors by segment, the one that was asked for last at the end
        self._index = index
        last = index.last
        with storage_errors(f"{directory}: cannot be opened"):
            directory.mkdir(parents=True, exist_ok=True)
            self._number = last.segment if last else 1
            self._check_sizes(pruned)
            self._sequence = self._check_last(last) if last else 0
            self.remove(pruned)
            self._remove_unreferenced()
            self._end = last.offset + last.length if last else 0
            self._file = self._open_at_end()

    def path(self, number: int) -> Path:
        """Return the file of a segment."""
        return self._directory / f"{number:06d}.rollouts"

    def append(self, records: Sequence[tuple[int, bytes]]) -> list[PayloadReference]:
        """Write records (group, data) and return where they lie; durable on return. After an error nothing more may be appended."""
        references: list[PayloadReference] = []
        buffers: list[bytes] = []
        with storage_errors(f"{self.path(self._number)}: rollouts cannot be written"):
            for group, data in records:
                if self._end >= self._segment_bytes:
                    self._flush(buffers)
                    self._roll_over()
                self._sequence += 1
                checksum, length = _checksum(self._sequence, data), _RECORD.size + len(data)
                buffers += (_RECORD.pack(len(data), checksum, self._sequence), data)
                reference = PayloadReference(self._number, self._end, length, checksum)
                references.append(reference)
                self._index.add(group, reference)
                self._end += length
            self._flush(buffers)
        return references

    def read(self, reference: PayloadReference) -> bytes:
        """Return the data of a record; raises StorageError unless it lies there whole and unchanged."""
        return self._read(reference)[1]

    def unneeded(self, needed: Collection[int]) -> list[int]:
        """Return the segments of which no group is needed. Those with a group above all that are needed are of after the question."""
        wanted = GroupNumbers(needed)
        return [
            number
            for number, content in self._index.contents.items()
            if number != self._number and content.groups.isdisjoint(wanted) and content.groups.newest <= wanted.newest
        ]

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove segments for good. What cannot be removed is left to the next opening."""
        for number in numbers:
            self._index.contents.pop(number, None)
            if (reader := self._readers.pop(number, None)) is not None:
                os.close(reader)
            try:
                self.path(number).unlink(missing_ok=True)
            except OSError as error:
                _log.warning("%s: cannot be removed, will be tried again: %s", self.path(number), error.strerror)

    def close(self) -> None:
        """Release the files; idempotent."""
        for file in self._readers.values():
            os.close(file)
        self._readers.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self, reference: PayloadReference) -> tuple[int, bytes]:
        """Return sequence number and data of a record."""
        path = self.path(reference.segment)
        with storage_errors(f"{path}: cannot be read"):
            record = os.pread(self._reader(reference.segment), reference.length, reference.offset)
        if len(record) != reference.length or len(record) < _RECORD.size:
            raise self._damaged(reference, "is cut short")
        length, checksum, sequence = _RECORD.unpack_from(record)
        data = record[_RECORD.size :]
        if length != len(data) or checksum != reference.checksum or _checksum(sequence, data) != checksum:
            raise self._damaged(reference, "does not match its checksum")
        return sequence, data

    def _reader(self, number: int) -> int:
        """Return a descriptor to read a segment by; the one that was asked for longest ago makes room. May raise OSError."""
        file = self._readers.pop(number, None)
        if file is None:
            if len(self._readers) >= _OPEN_TO_READ:
                os.close(self._readers.pop(next(iter(self._readers))))
            file = open_descriptor(self.path(number))
        self._readers[number] = file
        return file

    def _damaged(self, reference: PayloadReference, how: str) -> StorageError:
        return StorageError(f"{self.path(reference.segment)}: the record at byte {reference.offset} {how}: the file is damaged, {_RESTORE}")

    # ------------------------------------------------------------------------------------------------------------------- at the opening

    def _check_sizes(self, pruned: AbstractSet[int]) -> None:
        """Check that every segment that a history refers to is there, of this format, and as long as its references say."""
        for number, content in self._index.contents.items():
            if number in pruned:
                continue
            path = self.path(number)
            try:
                with open_regular(path) as file:
                    magic, size = file.read(len(_MAGIC)), os.fstat(file.fileno()).st_size
            except FileNotFoundError:
                raise StorageError(f"{path}: is missing, but the journal refers to it: {_RESTORE}") from None
            if magic != _MAGIC:
                raise StorageError(f"{path}: is damaged, or no segment of version {FORMAT_VERSION}: {_RESTORE}")
            if size < content.end:
                raise StorageError(f"{path}: is damaged: {size} bytes, the journal refers to {content.end}: {_RESTORE}")

    def _check_last(self, last: PayloadReference) -> int:
        """Check that the last record referred to is whole; return its sequence number."""
        return self._read(last)[0]

    def _remove_unreferenced(self) -> None:
        """Remove segments that were begun and never referred to before the process ended."""
        for path in self._directory.glob("*.rollouts"):
            if path.stem.isdecimal() and int(path.stem) > self._number:
                path.unlink()

    def _open_at_end(self) -> int:
        """Open the current segment for appending; cut away what lies behind the last record referred to, or begin the file."""
        file = open_descriptor(self.path(self._number), os.O_RDWR | os.O_CREAT | os.O_APPEND)
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


def _checksum(sequence: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(_SEQUENCE.pack(sequence)))


_sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has only the stronger one
