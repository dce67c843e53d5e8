"""Ports that nobody else is given while a test needs them, whether somebody listens there or nobody is to.

Each is held by a socket that is bound to it and never listens. On Linux a server, which binds with SO_REUSEADDR, may listen beside it;
elsewhere ports are let go again, and are only likely to stay free.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

LOOPBACK = "127.0.0.1"


@contextmanager
def held_ports(count: int = 1) -> Iterator[int]:
    """Hold so many ports in a row within the block; yields the first."""
    with ExitStack() as holds:
        first = 0
        while not first:
            first = _hold_row(holds, count)
        if sys.platform != "linux":
            holds.close()
        yield first


def _hold_row(holds: ExitStack, count: int) -> int:
    """Hold a row; returns its first port, 0: its neighbours are somebody's."""
    with ExitStack() as row:
        try:
            first = row.enter_context(_bound(0)).getsockname()[1]
            for port in range(first + 1, first + count):
                with socket.socket() as alone:  # who holds it as we do would share it
                    alone.bind((LOOPBACK, port))
                row.enter_context(_bound(port))
        except (OSError, OverflowError):
            return 0
        holds.enter_context(row.pop_all())
    return int(first)


def _bound(port: int) -> socket.socket:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((LOOPBACK, port))
    return held
