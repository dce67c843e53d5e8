"""What it took to bring weights to engines: how often, by which way, how many bytes, how long. Sums over all engines, and the latest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from headway.types import Transferred, TransferWay


class TransferSums:
    """Adds transfers up; what failed is not among them."""

    def __init__(self) -> None:
        self._by_way: dict[str, int] = dict.fromkeys(get_args(TransferWay), 0)
        self._bytes = 0
        self._seconds = 0.0
        self._latest: Transferred | None = None

    def add(self, done: Transferred) -> None:
        """Count one."""
        self._by_way[done.way] += 1
        self._bytes += done.bytes
        self._seconds += done.seconds
        self._latest = done

    def snapshot(self) -> Mapping[str, Any]:
        """Return the figures of the pipeline's rows."""
        latest = self._latest
        return {
            "transfers": dict(self._by_way),
            "transfer_bytes": self._bytes,
            "transfer_seconds": self._seconds,
            "last_transfer_bytes": None if latest is None else latest.bytes,
            "last_transfer_seconds": None if latest is None else latest.seconds,
        }
