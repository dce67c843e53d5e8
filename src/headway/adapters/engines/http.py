"""HTTP as engines are spoken to: one aiohttp session with its defaults taken out that cost long runs their rollouts.

No cap on concurrency, no limit on how long an answer takes (connecting is limited), no proxy variables, no cookies, no redirects, bounded
bodies. Cancelling a request closes its connection, which is how an engine learns that nobody waits any more. Nothing is retried here.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from aiohttp import hdrs

from headway.adapters.engines.connecting import PatientConnector
from headway.adapters.engines.credentials import Credentials
from headway.formats.bounded import brief
from headway.secrecy import concealed, without_login

MAX_BODY_BYTES = 256 * 1024 * 1024
KEEP_ALIVE_SECONDS = 4.0  # below the 5 s after which uvicorn closes an idle connection: no request meets a closing one
# Bodies are taken as they come. Named here, as aiohttp is slow to leave a header out that it sends of its own accord.
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "headway"}
_MOST_TARGETS = 1024


class ConnectionFailed(OSError):
    """No connection, or one that broke before the answer was complete."""

    def __init__(self, message: str) -> None:
        super().__init__(concealed(message))


class BadResponse(ConnectionFailed):
    """What came back is not HTTP, or larger than allowed."""


class Response(NamedTuple):
    """A whole answer. `retry_after` is that header's value, empty if absent."""

    status: int
    body: bytes
    retry_after: str


class _Target(NamedTuple):
    """What is derived of a URL once. `headers`: besides those of every request."""

    url: str
    headers: dict[str, str] | None


class HttpPool:
    """Kept connections to any number of servers; made on the first request, inside the loop that uses them.

    Each request carries what its server asks for (`Credentials`).
    """

    def __init__(self, *, connect_timeout_seconds: float = 5.0) -> None:
        self._connect_timeout = connect_timeout_seconds
        self._credentials = Credentials()
        self._targets: dict[str, _Target] = {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def request(
        self, method: str, url: str, body: bytes = b"", *, fresh: bool = False, most: int = MAX_BODY_BYTES
    ) -> Coroutine[Any, Any, Response]:
        """Send one request and return the whole response, whatever its status, when awaited. `fresh`: on a new connection.

        `most`: bytes of a body that is read; one that has more is a `BadResponse`. Raises `ConnectionFailed` when there is no connection
        or it broke, and after `close`: whoever outlives the pool opens nothing anew.
        """
        if self._closed:
            raise ConnectionFailed(f"no request goes to {urlsplit(url).netloc} any more: the connections are closed")
        target = self._targets.get(url) or self._learn(url)
        if fresh:
            return self._afresh(method, target, body, most)
        if self._session is None:
            self._session = self._new_session(keep=True)
        return _exchange(self._session, method, target, body, most)

    async def close(self) -> None:
        """Close the connections; idempotent."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _afresh(self, method: str, target: _Target, body: bytes, most: int) -> Response:
        async with self._new_session(keep=False) as session:
            return await _exchange(session, method, target, body, most)

    def _learn(self, url: str) -> _Target:
        bare = without_login(url)  # a login that counts is among the credentials
        authorization = self._credentials.authorization(bare)
        target = _Target(bare, {"Authorization": authorization} if authorization else None)
        if len(self._targets) >= _MOST_TARGETS:
            self._targets.clear()
        self._targets[url] = target
        return target

    def _new_session(self, *, keep: bool) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=PatientConnector(keep_seconds=KEEP_ALIVE_SECONDS if keep else None),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            auto_decompress=False,
        )


async def _exchange(session: aiohttp.ClientSession, method: str, target: _Target, body: bytes, most: int) -> Response:
    url = target.url
    try:
        response = await session.request(method, url, data=body, headers=target.headers, allow_redirects=False)
        headers = response.headers
        length = headers.get(hdrs.CONTENT_LENGTH)
        if length is not None and int(length) > most:
            raise _too_large(response, most)
        # Either gives the connection back when it has read the body, and closes it otherwise.
        whole = await (_bounded(response, most) if length is None or hdrs.TRANSFER_ENCODING in headers else response.read())
        return Response(response.status, whole, headers.get(hdrs.RETRY_AFTER, ""))
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise ConnectionFailed(f'"{url}" is no http:// or https:// URL') from error
    except aiohttp.ConnectionTimeoutError as error:
        host = urlsplit(url).netloc
        raise ConnectionFailed(f"{host} did not accept a connection within {session.timeout.sock_connect:g} s") from error
    except aiohttp.ClientConnectorError as error:
        raise ConnectionFailed(f"{urlsplit(url).netloc} cannot be reached: {error.strerror or error}") from error
    except (aiohttp.ClientResponseError, aiohttp.http_exceptions.HttpProcessingError) as error:
        raise BadResponse(f"{urlsplit(url).netloc} did not answer in HTTP: {brief(error)}") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        what = str(error) or type(error).__name__
        raise ConnectionFailed(f"the connection to {urlsplit(url).netloc} broke before the answer was complete: {what}") from error


async def _bounded(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return a body whose length was not told."""
    body = bytearray()  # not a list of parts: a server may send a byte at a time
    try:
        async for part in response.content.iter_any():
            body += part
            if len(body) > most:
                raise _too_large(response, most)
    except BaseException:
        response.close()
        raise
    return bytes(body)


def _too_large(response: aiohttp.ClientResponse, most: int) -> BadResponse:
    response.close()
    return BadResponse(f"{response.url.authority} answered with more than {most} bytes")
