"""Reads HTTP/1.1 responses from bytes as they arrive: sized, chunked, or ended by their connection; bounded, strict, without I/O."""

from __future__ import annotations

from typing import NamedTuple

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 256 * 1024 * 1024


class ConnectionFailed(OSError):
    """No connection, or one that broke before the answer was complete."""


class BadResponse(ConnectionFailed):
    """What came back is not HTTP/1.1, or larger than allowed."""


class Response(NamedTuple):
    """A whole answer. `retry_after` is that header's value, empty if absent."""

    status: int
    body: bytes
    retry_after: str
    keep_alive: bool


class ResponseParser:
    """Reads one response from bytes as they arrive, however they are cut. No I/O."""

    __slots__ = ("_buffer", "_chunked", "_keep_alive", "_length", "_parts", "_retry_after", "_status")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._status = 0
        self._length: int | None = None
        self._chunked = False
        self._keep_alive = True
        self._retry_after = ""
        self._parts: list[bytes] = []

    @property
    def started(self) -> bool:
        """Whether any byte of the response has arrived."""
        return bool(self._status or self._buffer)

    def feed(self, data: bytes) -> Response | None:
        """Take more bytes; return the response once it is whole. Raises `BadResponse`."""
        self._buffer += data
        while not self._status:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > MAX_HEAD_BYTES:
                    raise BadResponse(f"the head of the response is longer than {MAX_HEAD_BYTES} bytes")
                return None
            self._read_head(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
        if self._chunked:
            return self._read_chunks()
        if len(self._buffer) > MAX_BODY_BYTES:
            raise BadResponse(f"the response is longer than {MAX_BODY_BYTES} bytes")
        if self._length is None or len(self._buffer) < self._length:
            return None
        if len(self._buffer) > self._length:
            raise BadResponse("more bytes than the response announced")
        return self._whole(bytes(self._buffer))

    def end(self) -> Response | None:
        """Take the end of the connection: a body without an announced length is whole now."""
        if self._status and not self._chunked and self._length is None:
            self._keep_alive = False
            return self._whole(bytes(self._buffer))
        return None

    def _whole(self, body: bytes) -> Response:
        return Response(self._status, body, self._retry_after, self._keep_alive)

    def _read_head(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        version, _, rest = lines[0].partition(b" ")
        code = rest[:3]
        if not version.startswith(b"HTTP/1.") or not code.isdigit():
            raise BadResponse(f"not an HTTP/1.1 response: {lines[0][:80]!r}")
        status = int(code)
        if status < 200:  # 100 Continue and its kind: the real head follows
            return
        self._status = status
        self._keep_alive = version != b"HTTP/1.0"
        if status in {204, 304}:
            self._length = 0
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            match name.lower():
                case b"content-length":
                    self._length = self._number(value.strip(), 10)
                case b"transfer-encoding":
                    self._chunked = b"chunked" in value.lower()
                case b"connection":
                    self._keep_alive = b"close" not in value.lower()
                case b"retry-after":
                    self._retry_after = value.strip().decode("latin-1")
                case _:
                    pass

    def _read_chunks(self) -> Response | None:
        buffer = self._buffer
        while (line_end := buffer.find(b"\r\n")) >= 0:
            size = self._number(bytes(buffer[:line_end]).partition(b";")[0].strip(), 16)
            if size == 0:
                # the trailer section: header lines, then an empty line
                if buffer[line_end : line_end + 4] == b"\r\n\r\n" or buffer.find(b"\r\n\r\n", line_end) >= 0:
                    return self._whole(b"".join(self._parts))
                return None
            start = line_end + 2
            if len(buffer) < start + size + 2:
                return None
            self._parts.append(bytes(buffer[start : start + size]))
            del buffer[: start + size + 2]
        if len(buffer) > MAX_HEAD_BYTES:
            raise BadResponse("a chunk without a size")
        return None

    @staticmethod
    def _number(text: bytes, base: int) -> int:
        try:
            value = int(text, base)
        except ValueError:
            raise BadResponse(f"not a length: {text[:40]!r}") from None
        if not 0 <= value <= MAX_BODY_BYTES:
            raise BadResponse(f"a length of {value}: at most {MAX_BODY_BYTES} bytes are read")
        return value
