"""Journal events as one line of JSON each, so that `sqlite3 events.sqlite` answers questions without headway.

The tag `event` names the kind; fields are those of `headway.types`. A field added with a default stays readable both ways; anything else
raises `SCHEMA_VERSION`, which a journal stores and checks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headway.errors import StorageError
from headway.events import AnyEvent
from headway.formats.bounded import brief

SCHEMA_VERSION = 1

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)
_many_decoder = msgspec.json.Decoder(list[AnyEvent])


def encode_event(event: AnyEvent) -> bytes:
    """Encode one event as a line of JSON (without the line's end); raises StorageError for a number that is not finite."""
    line = _encoder.encode(event)
    if b"null" in line and not _reads_back(line, event):  # JSON has no NaN, the encoder wrote null
        raise StorageError(f"journal event holds a number that is not finite: {event!r}")
    return line


def _reads_back(line: bytes, event: AnyEvent) -> bool:
    try:
        return bool(_decoder.decode(line) == event)
    except msgspec.ValidationError:
        return False


def decode_event(data: bytes | str) -> AnyEvent:
    """Decode one event; raises StorageError for anything else."""
    try:
        event: AnyEvent = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StorageError(f"journal event cannot be read: {brief(error)}: {data[:100]!r}") from error
    return event


def decode_events(lines: Sequence[bytes]) -> list[AnyEvent]:
    """Decode many events in one go, which is what takes the time of a resume; raises StorageError naming the first that is none."""
    try:
        return _many_decoder.decode(b"[" + b",".join(lines) + b"]")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return [decode_event(line) for line in lines]
