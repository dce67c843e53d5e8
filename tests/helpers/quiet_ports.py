"""A port that stays free until whoever asked for it binds it, and after he has let it go.

The kernel has one range for servers that ask for port 0 and for connections: what was found free there a moment ago may be another's by
now. So ports are chosen below it, and where each process of a test run begins to look depends on its id.
"""

import itertools
import os
import socket
from pathlib import Path

LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_STEP = 101  # ports for a process, before those of the next begin
_given = itertools.count()


def quiet_port() -> int:
    """Return a port of 127.0.0.1 that nobody has, and the kernel gives to nobody; another one each time."""
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    span = max(1, end - LOWEST)
    while True:
        port = LOWEST + (os.getpid() * _STEP + next(_given)) % span
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
