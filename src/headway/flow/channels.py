"""Bounded, closable channels: a value is handed over, a full channel is back-pressure, a closed channel is the end of the input.

One loop, no locks. `async for` ends when the channel is closed and empty; sending into a closed channel is an error, since a crash must
never look like a drain.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class ChannelClosedError(Exception):
    """Something was sent into a channel after its end had been declared."""


class Channel(Generic[T]):
    """A queue of at most `capacity` values between components."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a channel holds at least 1 value, not {capacity}")
        self._capacity = capacity
        self._values: deque[T] = deque()
        self._senders: deque[asyncio.Future[None]] = deque()
        self._receivers: deque[asyncio.Future[None]] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._values)

    async def send(self, value: T) -> None:
        """Hand over one value; waits while the channel is full."""
        while len(self._values) >= self._capacity and not self._closed:
            await _parked(self._senders)
        if self._closed:
            raise ChannelClosedError("send after close")
        self._values.append(value)
        _wake_one(self._receivers)

    def close(self) -> None:
        """Declare the end of the input; idempotent. What is inside can still be received."""
        self._closed = True
        for waiters in (self._receivers, self._senders):
            while waiters:
                _wake_one(waiters)

    def take_all(self) -> list[T]:
        """Take what is inside, without waiting."""
        taken = list(self._values)
        self._values.clear()
        for _ in taken:
            _wake_one(self._senders)
        return taken

    def __aiter__(self) -> Channel[T]:
        return self

    async def __anext__(self) -> T:
        while not self._values:
            if self._closed:
                raise StopAsyncIteration
            await _parked(self._receivers)
        value = self._values.popleft()
        _wake_one(self._senders)
        return value


async def _parked(waiters: deque[asyncio.Future[None]]) -> None:
    future = asyncio.get_running_loop().create_future()
    waiters.append(future)
    try:
        await future
    except asyncio.CancelledError:
        if future in waiters:
            waiters.remove(future)
        else:  # woken and cancelled at once: hand the wake-up on, or it is lost
            _wake_one(waiters)
        raise


def _wake_one(waiters: deque[asyncio.Future[None]]) -> None:
    while waiters:
        future = waiters.popleft()
        if not future.done():
            future.set_result(None)
            return
