"""Which addresses are this machine's own: what listens there is reached from nowhere else."""

from __future__ import annotations

import ipaddress
from contextlib import suppress


def is_loopback(host: str) -> bool:
    """Whether an address, or a host's name, is of the loopback interface; a name other than localhost counts as not."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
