"""`POST /v1/rollouts`: another program hands a group of rollouts to the run, over HTTP, and learns whether it was taken.

202 means durable and in a batch's line; every other status means that nothing was kept, and says why in one line. 429 and 503 carry
Retry-After where coming again makes sense. Address and token are written to `ingest.json` in the run directory, readable by the run's user
only, and removed at the end; the token is made anew for each run and is never logged. It is all that protects the endpoint.

What a stranger sends costs little: there are no more than `CONNECTIONS` at once, one that does not send a header is closed, without the
token no body is read, and of bodies no more than `HELD_BODIES` of the largest size are held at once. A body is decoded on the run's loop, a
rollout at a time: some 20 ms a megabyte of JSON.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from headway.adapters.ingest.connections import BoundedServer
from headway.errors import ConfigError
from headway.flow.ingest import Ingest, Refusal, Refused
from headway.formats.files import storage_errors, strict_json, temporary_sibling
from headway.formats.offered import Encoding, InvalidGroup, OfferedGroup, SampleLimits, decoding
from headway.loopback import is_loopback
from headway.secrecy import keep_secret
from headway.settings import IngestSection

ROLLOUTS, HEALTH = "/v1/rollouts", "/v1/health"
CONNECTIONS = 256
HEADER_SECONDS = 10.0  # in which the header of a new connection's first request must have arrived
BODY_SECONDS = 60.0  # in which a request's body must have arrived
HELD_BODIES = 4  # of the largest size, all requests together
LINGER_SECONDS = 2.0  # what still comes of a body that was refused is read away, so that its sender sees the answer
IDLE_SECONDS = 60.0  # of a connection between two requests
SHUTDOWN_SECONDS = 1.0

_STATUS: Mapping[Refusal, int] = {
    "no slack": 429,
    "busy": 429,
    "not started": 503,
    "ending": 503,
    "invalid": 400,
    "too large": 413,
    "incomplete": 408,
    "unauthorized": 401,
}
_MESSAGE: Mapping[Refusal, str] = {
    "no slack": "no batch can spare a place for this group now: send it again after Retry-After seconds",
    "busy": "too many requests wait already: send it again after Retry-After seconds",
    "not started": "the run has not started yet: send it again after Retry-After seconds",
    "ending": "the run is ending and takes no more rollouts",
}
_ENCODINGS: Mapping[str, Encoding] = {"application/json": "json", "application/msgpack": "msgpack", "application/x-msgpack": "msgpack"}
_log = logging.getLogger("headway")


class _Rejected(Exception):
    """A request that is refused before its group could be offered."""

    def __init__(self, refused: Refused, message: str = "", *, status: int = 0) -> None:
        super().__init__(message or _MESSAGE[refused.reason])
        self.refused = refused
        self.status = status or _STATUS[refused.reason]


class IngestServer:
    """Listens while it runs; hands each group to `ingest`. `address_file`: where clients find url and token."""

    def __init__(
        self,
        settings: IngestSection,
        *,
        ingest: Ingest,
        limits: SampleLimits,
        address_file: Path,
        clock: Callable[[], float],
        body_seconds: float = BODY_SECONDS,
        header_seconds: float = HEADER_SECONDS,
        connections: int = CONNECTIONS,
    ) -> None:
        self._settings = settings
        self._ingest = ingest
        self._limits = limits
        self._address_file = address_file
        self._clock = clock
        self._body_seconds = body_seconds
        self._header_seconds = header_seconds
        self._connections = connections
        self._token = secrets.token_hex(32)
        keep_secret(self._token)
        self.held = 0  # bytes of bodies that are being read

    async def run(self) -> None:
        """Serve until cancelled. Raises ConfigError when the address cannot be listened on."""
        host = self._settings.host
        server = BoundedServer(
            self.answer,
            most=self._connections,
            header_seconds=self._header_seconds,
            idle_seconds=IDLE_SECONDS,
            access_log=None,
            auto_decompress=False,
            lingering_time=LINGER_SECONDS,
            logger=_log,
        )
        runner = web.ServerRunner(server, shutdown_timeout=SHUTDOWN_SECONDS)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, self._settings.port)
            try:
                await site.start()
            except OSError as error:
                asked = f"ingest.host, ingest.port: {host}:{self._settings.port} cannot be listened on"
                raise ConfigError(f"{asked}: {error.strerror or error}: choose another, or port 0 for a free one") from error
            url = f"http://{f'[{host}]' if ':' in host else host}:{site.port}"
            if not is_loopback(host):
                _log.warning("ingest listens on %s, beyond this machine: its token is all that protects it, and it travels in clear", url)
            self._write_address(url)
            await asyncio.Event().wait()
        finally:
            with suppress(OSError):  # the token in it is worth nothing from here on
                self._address_file.unlink(missing_ok=True)
            await runner.cleanup()

    def _write_address(self, url: str) -> None:
        temporary = temporary_sibling(self._address_file)
        with storage_errors(f"{self._address_file}: cannot be written"):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with open(descriptor, "wb") as file:  # noqa: PTH123 -- born unreadable for others
                    file.write(strict_json({"url": url, "token": self._token}))
                temporary.replace(self._address_file)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer one HTTP request, in JSON."""
        if request.path == HEALTH:
            return self._health() if request.method == "GET" else _wrong_method("GET")
        if request.path != ROLLOUTS:
            return _json(404, {"error": f"{request.path[:200]} is not served here: POST {ROLLOUTS}, GET {HEALTH}"})
        if request.method != "POST":
            return _wrong_method("POST")
        try:
            encoding = self._welcome(request)
            await _send_continue(request)
            group = await self._received(request, encoding)
        except _Rejected as rejected:
            self._ingest.refuse(rejected.refused)
            return _refusal(rejected.status, rejected.refused, str(rejected))
        outcome = await self._ingest.offer(group)
        if isinstance(outcome, Refused):
            return _refusal(_STATUS[outcome.reason], outcome, _MESSAGE[outcome.reason])
        return _json(202, {"group": outcome.group, "batch": outcome.batch})

    def _health(self) -> web.Response:
        refused = self._ingest.unwelcome()
        if refused is None or refused.reason == "busy":
            return _json(200, {"status": "ready"})
        return _json(503, {"status": refused.reason})

    def _welcome(self, request: web.BaseRequest) -> Encoding:
        """Return how the body is encoded, having checked all that can be told without it."""
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise _Rejected(Refused("unauthorized"), "Authorization: Bearer TOKEN is missing or wrong: it stands in ingest.json")
        if (unwelcome := self._ingest.unwelcome()) is not None:
            raise _Rejected(unwelcome)
        encoding = _ENCODINGS.get(request.content_type)
        if encoding is None or request.headers.get("Content-Encoding", "identity") != "identity":
            message = "Content-Type must be application/json or application/msgpack, without Content-Encoding"
            raise _Rejected(Refused("invalid"), message, status=415)
        if (request.content_length or 0) > self._settings.max_request_bytes:
            raise self._too_large()
        return encoding

    async def _received(self, request: web.BaseRequest, encoding: Encoding) -> OfferedGroup:
        """Read the body, no more of it than allowed, and return the group in it."""
        most = self._settings.max_request_bytes
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_seconds):
                async for chunk in request.content.iter_any():
                    self.held += len(chunk)
                    body += chunk
                    if len(body) > most:
                        raise self._too_large()
                    if self.held > HELD_BODIES * most:
                        raise _Rejected(Refused("busy", 1))
            return await self._decoded(body, encoding)
        except TimeoutError:
            raise _Rejected(Refused("incomplete"), f"the body did not arrive within {self._body_seconds:g} s") from None
        except (ConnectionError, web.RequestPayloadError) as error:
            raise _Rejected(Refused("incomplete"), "the body did not arrive whole", status=400) from error
        except InvalidGroup as error:
            raise _Rejected(Refused("invalid"), str(error)) from error
        finally:
            self.held -= len(body)

    async def _decoded(self, body: bytearray, encoding: Encoding) -> OfferedGroup:
        """Return the group in a body; the run goes on between two rollouts of it."""
        steps = decoding(body, source="external", limits=self._limits, now=self._clock(), encoding=encoding)
        while (group := next(steps)) is None:  # noqa: ASYNC110 -- it waits for nothing, it makes room
            await asyncio.sleep(0)
        return group

    def _too_large(self) -> _Rejected:
        return _Rejected(Refused("too large"), f"the body has more than ingest.max_request_bytes ({self._settings.max_request_bytes})")


async def _send_continue(request: web.BaseRequest) -> None:
    """Tell a client that waits for it (curl does, with large bodies) to send the body."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= (1, 1):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


def _refusal(status: int, refused: Refused, message: str) -> web.Response:
    headers = {"Retry-After": str(refused.retry_seconds)} if refused.retry_seconds else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _json(status, {"error": message}, headers)


def _wrong_method(allowed: str) -> web.Response:
    return _json(405, {"error": f"only {allowed} is served here"}, {"Allow": allowed})


def _json(status: int, value: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json", headers=headers)
