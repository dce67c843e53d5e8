"""The requests of one attempt that are in flight at its engine, and how they are given up together when it hangs.

An engine that hangs answers nothing and breaks nothing off, and a generation may rightly take an hour: it is for others to tell the two
apart.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class InFlight:
    """Requests, each within a `request()` block; `give_up` ends all of them by TimeoutError, and all that come, until `renew`."""

    def __init__(self) -> None:
        self._requests: set[_Request] = set()
        self._given_up = False

    def request(self) -> _Request:
        """Return a block to await one request within. It raises TimeoutError when the request is given up."""
        return _Request(self._requests, given_up=self._given_up)

    def give_up(self) -> None:
        """Give up what is in flight, and what will be."""
        self._given_up = True
        for request in self._requests:
            request.end()

    def renew(self) -> None:
        """Let further requests be made: they go elsewhere."""
        self._given_up = False


class _Request:
    """One block; while it lasts it is among `those`. A class, since a generator's context costs each request twice as much."""

    __slots__ = ("_given_up", "_limit", "_those")

    def __init__(self, those: set[_Request], *, given_up: bool) -> None:
        self._those = those
        self._given_up = given_up
        self._limit = asyncio.Timeout(None)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._those.add(self)
        if self._given_up:
            self.end()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._those.discard(self)
        await self._limit.__aexit__(kind, error, trace)

    def end(self) -> None:
        if not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())
