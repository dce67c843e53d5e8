"""The key / value cache: one row per live sequence, rows dense from 0.

`keys` and `values` are [layers, rows, heads, length, head_dim]: a decode step over the first B rows is a view, not a gather. The cache
starts small and grows when more rows or a longer one are needed; one long sequence makes every row long, which is the price of the
view (a paged cache is what a real vLLM is for).

The length grows by a quarter only: rows that are little longer than what is read lie close together in memory, and on a CPU decode steps
are bound by that memory (2 times faster for 256 rows than with twice the length).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LENGTH_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one position of one row holds."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class SlotCache:
    """Keys and values of live sequences. Positions past a row's length hold leftovers, always finite, which attention masks."""

    def __init__(self, shape: CacheShape, *, max_rows: int, max_length: int) -> None:
        self._shape = shape
        self._max_rows = max_rows
        self._max_length = _rounded(max_length)
        self.keys, self.values = self._zeros(0, 0), self._zeros(0, 0)
        self.reserve(min(16, max_rows), 4 * LENGTH_MULTIPLE)

    @property
    def rows(self) -> int:
        """Rows there is room for now."""
        return self.keys.shape[1]

    @property
    def length(self) -> int:
        """Positions there is room for in each row now."""
        return self.keys.shape[3]

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` positions; what is cached stays."""
        if rows <= self.rows and length <= self.length:
            return
        rows = self.rows if rows <= self.rows else min(self._max_rows, max(rows, 2 * self.rows))
        length = self.length if length <= self.length else min(self._max_length, _rounded(max(length, self.length * 5 // 4)))
        for name in ("keys", "values"):
            old, new = getattr(self, name), self._zeros(rows, length)
            new[:, : old.shape[1], :, : old.shape[3]] = old
            setattr(self, name, new)

    def move(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of rows `sources` to rows `targets` (int64, equally many, disjoint)."""
        for tensor in (self.keys, self.values):
            part = tensor[:, :, :, :length]
            part[:, targets] = part[:, sources]

    def clear(self, row: int) -> None:
        """Zero a row whose contents may not be finite: a mask hides numbers, but not NaN."""
        self.keys[:, row] = 0
        self.values[:, row] = 0

    def _zeros(self, rows: int, length: int) -> torch.Tensor:
        shape = self._shape
        return torch.zeros(shape.layers, rows, shape.heads, length, shape.head_dim, dtype=shape.dtype, device=shape.device)


def _rounded(length: int) -> int:
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
