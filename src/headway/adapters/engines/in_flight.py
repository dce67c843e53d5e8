"""The requests of one attempt that are in flight at its engine, and how they are given up together when it hangs.

An engine that hangs answers nothing and breaks nothing off, and a generation may rightly take an hour: it is for others to tell the two
apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class InFlight:
    """Requests, each within a `request()` block; `give_up` ends all of them by TimeoutError, and all that come, until `renew`."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self._given_up = False

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Await one request within the block. Raises TimeoutError when it is given up."""
        async with asyncio.timeout(None) as limit:
            if self._given_up:
                _end(limit)
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    def give_up(self) -> None:
        """Give up what is in flight, and what will be."""
        self._given_up = True
        for limit in self._limits:
            _end(limit)

    def renew(self) -> None:
        """Let further requests be made: they go elsewhere."""
        self._given_up = False


def _end(limit: asyncio.Timeout) -> None:
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())
