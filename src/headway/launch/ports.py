"""The ports of launched engines: known before the engines start, and kept for them while the run goes on, restarts included.

A port is held by a socket that is bound to it and never listens. On Linux the engine, which binds with SO_REUSEADDR as servers do, may bind
and listen beside it, and nobody is given that port by the kernel meanwhile: not between the choice and the start, nor while a successor
starts. Elsewhere a port is chosen and let go, and may be taken by somebody else before the engine binds it.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from contextlib import ExitStack
from typing import Self

from headway.errors import ConfigError

LOOPBACK = "127.0.0.1"
_LARGEST = 65535
_LOOK_SECONDS = 0.05


class Ports:
    """Ports by the number of the engine; `close` lets them go."""

    def __init__(self, ports: list[int], holds: ExitStack) -> None:
        self._ports = ports
        self._holds = holds

    @classmethod
    async def reserve(cls, count: int, first: int, *, patience_seconds: float = 0.0) -> Self:
        """Take `count` ports, `first` and those that follow it; `first` 0: free ones.

        `patience_seconds`: for whoever listens there yet, like the engine of a process before. Raises ConfigError.
        """
        if first + count - 1 > _LARGEST:
            raise ConfigError(
                f"engine.port is {first}, and the last of {count} engines would have {first + count - 1}: choose a smaller one"
            )
        due = asyncio.get_running_loop().time() + patience_seconds
        ports: list[int] = []
        with ExitStack() as holds:
            for index in range(count):
                wanted = first + index if first else 0
                while (held := _bound(wanted)) is None:
                    if asyncio.get_running_loop().time() >= due:
                        raise _in_use(first, wanted, index)
                    await asyncio.sleep(_LOOK_SECONDS)
                holds.enter_context(held)
                ports.append(held.getsockname()[1])
            kept = holds.pop_all()
        if sys.platform != "linux":
            kept.close()
        return cls(ports, kept)

    def __getitem__(self, index: int) -> int:
        """Return the port of an engine."""
        return self._ports[index]

    def close(self) -> None:
        """Let the ports go; idempotent."""
        self._holds.close()


def _bound(port: int) -> socket.socket | None:
    """Return a socket that has this port, 0: a free one, and does not listen; None: somebody listens there. Raises ConfigError."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, port))
    except OSError as error:
        held.close()
        if error.errno == errno.EADDRINUSE and port:
            return None
        raise ConfigError(f"engine.port is {port}, which cannot be listened on: {error.strerror or error}: choose another") from error
    return held


def _in_use(first: int, port: int, index: int) -> ConfigError:
    whose = "" if index == 0 else f", so engine-{index} has port {port}"
    return ConfigError(f"engine.port is {first}{whose}: port {port} is in use: choose another, or 0 for free ones")
