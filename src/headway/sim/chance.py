"""Chance that belongs to what it happens to: numbers are a function of a key, not of the order in which they are asked for.

`Draws("seed", "prompt 7", member)` gives the same sequence in every schedule, process and Python version (BLAKE2b in counter mode).
"""

from __future__ import annotations

import struct
from hashlib import blake2b

_WORD = struct.Struct("<Q").unpack_from
_WORDS = 8  # in a block


class Draws:
    """A sequence of uniform numbers in the open interval (0, 1), 52 bits each, fixed by a key: its parts, or these joined by NUL."""

    __slots__ = ("_block", "_blocks", "_key", "_left")

    def __init__(self, *key: str | int) -> None:
        self._key = "\0".join(map(str, key)).encode()
        self._block = b""
        self._blocks = self._left = 0

    def random(self) -> float:
        """Return the next number; never 0 or 1, so that every quantile function takes it."""
        if not self._left:
            self._block = blake2b(self._key, salt=self._blocks.to_bytes(16, "little")).digest()
            self._blocks += 1
            self._left = _WORDS
        self._left -= 1
        word: int = _WORD(self._block, 8 * self._left)[0]  # the last first
        return ((word >> 12) + 0.5) * 2.0**-52
