"""Administrative calls to one engine: bounded in time and size, each on a connection of its own, sent again where that may help.

A broken connection, a 429 and a 5xx may pass, so the call is repeated, a few times. (After a failed reload vLLM closes the connection:
a kept one would break under the next call.) A call that is not answered in time may still be at work: it is not sent again.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec

from headway.adapters.engines.credentials import KEY
from headway.adapters.engines.generation import excerpt
from headway.adapters.engines.http import ConnectionFailed, HttpPool, Response
from headway.errors import EngineFailed, EngineSilent, EngineUnreachable
from headway.rules.scheduling import backoff_seconds

MOST_ANSWER_BYTES = 1024**2
_RETRY_SECONDS = 0.2  # doubled per try
_LONGEST_RETRY_SECONDS = 2.0
_AT_HAND_SECONDS = 10.0


class CallRefused(EngineFailed):
    """The engine answered a call with another status than 200, or with 200 and that it has not done it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Calls:
    """Calls one engine by name and base URL. `hint_404`: what to look at where a path is not there."""

    def __init__(self, name: str, url: str, *, timeout_seconds: float, retries: int, hint_404: str = "") -> None:
        self.name = name
        self.url = url
        self.timeout_seconds = timeout_seconds
        self._retries = retries
        self._hint_404 = hint_404
        self._http = HttpPool()

    async def call(self, method: str, path: str, body: Any = None) -> bytes:
        """Return the body of the answer with status 200. Raises `EngineFailed`, which names engine, call and answer."""
        data = b"" if body is None else msgspec.json.encode(body)
        call = f"{self.name}: {method} {self.url}{path}"
        failed: EngineFailed | None = None
        for tries in range(self._retries + 1):
            if tries:
                await asyncio.sleep(backoff_seconds(tries, random.random(), first=_RETRY_SECONDS, longest=_LONGEST_RETRY_SECONDS))  # noqa: S311
            try:
                async with asyncio.timeout(self.timeout_seconds):
                    response = await self._http.request(method, self.url + path, data, fresh=True, most=MOST_ANSWER_BYTES)
            except TimeoutError as late:
                limit = f"{self.timeout_seconds:g} s (engine.request_timeout_seconds)"
                raise EngineSilent(f"{call} was not answered within {limit}") from late
            except ConnectionFailed as error:
                failed = EngineUnreachable(f"{call} failed: {error}")
                failed.__cause__ = error
                continue
            if response.status == 200:
                return response.body
            failed = CallRefused(f"{call} failed: {self._refusal(response)}", response.status)
            if response.status < 500 and response.status != 429:
                break
        assert failed is not None  # noqa: S101 -- one try at least
        raise failed

    async def look(self, path: str, *, most: int) -> Response:
        """GET once and return the answer, whatever its status. Raises `EngineFailed`."""
        try:
            async with asyncio.timeout(self.timeout_seconds):
                return await self._http.request("GET", self.url + path, fresh=True, most=most)
        except (ConnectionFailed, TimeoutError) as error:
            raise EngineFailed(f"{self.name}: {self.url}{path} cannot be read: {str(error) or 'no answer in time'}") from error

    async def first(self, *paths: str) -> bytes:
        """GET the first of these paths that is there. Raises `EngineFailed`."""
        for path in paths[:-1]:
            try:
                return await self.call("GET", path)
            except CallRefused as error:
                if error.status != 404:
                    raise
        return await self.call("GET", paths[-1])

    async def brief(self, *paths: str) -> bytes:
        """GET the first of these paths that is there, of a server that has the answer at hand. Raises `EngineFailed`, TimeoutError."""
        async with asyncio.timeout(_AT_HAND_SECONDS):
            return await self.first(*paths)

    async def close(self) -> None:
        """Release connections; idempotent."""
        await self._http.close()

    def _refusal(self, response: Response) -> str:
        hint = f" ({self._hint_404})" if response.status == 404 and self._hint_404 else ""
        if response.status == 401:
            hint = f" (its key is to be in {KEY}, or in the variable that engine.api_key_variable names)"
        return f"it answered {response.status}: {excerpt(response.body)}{hint}"
