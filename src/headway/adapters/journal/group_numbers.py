"""Whose rollouts a segment holds, in a bit a group: a segment of small rollouts holds hundreds of thousands of groups.

Group numbers count up, so those of one segment lie close together. A set of ints takes some 80 bytes a number, and a long run keeps it for
as long as its segment is written.
"""

from __future__ import annotations

from collections.abc import Iterable

_PAGE_BITS = 1024


class GroupNumbers:
    """A set of numbers >= 0: one int of 1,024 bits for each page of them that it has any of."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._pages: dict[int, int] = {}
        for number in numbers:
            self.add(number)

    def add(self, number: int) -> None:
        """Take in one more."""
        page = number // _PAGE_BITS
        self._pages[page] = self._pages.get(page, 0) | 1 << number % _PAGE_BITS

    def isdisjoint(self, other: GroupNumbers) -> bool:
        """Whether no number is in both."""
        theirs = other._pages
        return not any(bits & theirs.get(page, 0) for page, bits in self._pages.items())

    @property
    def newest(self) -> int:
        """The highest number; -1: there is none."""
        page = max(self._pages, default=-1)
        return page * _PAGE_BITS + self._pages[page].bit_length() - 1 if page >= 0 else -1
