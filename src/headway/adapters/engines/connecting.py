"""Connects to a server by a few connections at a time, so that thousands of requests that begin together do not fail by their number.

A server takes new connections from a queue of a few thousand places at most and lets the rest wait for seconds; and a process that opens
thousands in one turn of its loop comes back to the first of them when its time is up. Neither is the server's failure. Requests on
connections that are there already wait for nothing.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.client_reqrep import ConnectionKey
    from aiohttp.tracing import Trace

MOST_CONNECTING = 64  # per server
_LATE = 1.25  # of the time limit: a limit that ends so late was missed by this process's loop, which had no time to look
_MOST_LATE = 8


class _Door:
    """One server's. `let_in`: how many connections it has accepted; `waiting`: each is told None (its turn) or what it fails by."""

    def __init__(self) -> None:
        self.free = MOST_CONNECTING
        self.let_in = 0
        self.waiting: deque[asyncio.Future[Exception | None]] = deque()

    async def enter(self) -> None:
        """Wait for a turn. Raises what a connection before it failed by, when the server accepts none."""
        if self.free:
            self.free -= 1
            return
        turn: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        try:
            refused = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result() is None:
                self.leave()
            raise
        if refused is not None:
            raise refused

    def leave(self) -> None:
        """Hand the turn on."""
        while self.waiting:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1

    def refuse(self, error: Exception) -> None:
        """Whoever waits would fail alike, one time limit after the other."""
        while self.waiting:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(copy.copy(error))


class PatientConnector(aiohttp.TCPConnector):
    """aiohttp's connector without a cap on connections, `MOST_CONNECTING` of which are being opened at once to each server.

    Waiting for a turn is not connecting: `sock_connect` begins after it. aiohttp has no hook there; this overrides what its other
    connectors do.
    """

    def __init__(self, *, keep_seconds: float | None) -> None:
        """`keep_seconds`: how long idle connections are kept; None: not at all."""
        if keep_seconds is None:
            super().__init__(limit=0, force_close=True)
        else:
            super().__init__(limit=0, keepalive_timeout=keep_seconds)
        self._doors: dict[ConnectionKey, _Door] = {}

    async def _create_connection(self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> ResponseHandler:
        door = self._doors.setdefault(req.connection_key, _Door())
        await door.enter()
        let_in = door.let_in
        try:
            await asyncio.sleep(0)  # whatever else begins in this turn of the loop is done before the time limit begins
            protocol = await self._in_time(req, traces, timeout)
        except (TimeoutError, aiohttp.ClientConnectorError) as error:
            if door.let_in == let_in:
                door.refuse(error)
            raise
        else:
            door.let_in += 1
            return protocol
        finally:
            door.leave()

    async def _in_time(self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout) -> ResponseHandler:
        """Connect; again where the time limit ended because this process was busy elsewhere."""
        loop = asyncio.get_running_loop()
        for left in range(_MOST_LATE, -1, -1):
            begun = loop.time()
            try:
                return await super()._create_connection(req, traces, timeout)
            except TimeoutError:
                if not left or timeout.sock_connect is None or loop.time() - begun < _LATE * timeout.sock_connect:
                    raise
        raise AssertionError  # the last one returns or raises
