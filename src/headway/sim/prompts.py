"""Prompts out of nothing, and an exporter that remembers: the two ends of a simulated run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from itertools import count
from typing import Any

from headway.errors import PromptError
from headway.sim.chance import Draws
from headway.types import Prompt


class ListPrompts:
    """`n` prompts, `epochs` times (0: without end), each epoch in an order of its own that the seed fixes.

    `fails_after`: the source fails once it has given so many prompts.
    """

    def __init__(self, n: int, *, epochs: int = 0, seed: int = 0, shuffle: bool = True, fails_after: int | None = None) -> None:
        self._n = n
        self._epochs = epochs
        self._seed = seed
        self._shuffle = shuffle
        self._fails_after = fails_after

    async def __aiter__(self) -> AsyncIterator[Prompt]:
        given = 0
        for epoch in range(self._epochs) if self._epochs else count():
            for number in self._order(epoch):
                if given == self._fails_after:
                    raise PromptError(f"the prompt source failed after {given} prompts, as the simulation's settings say")
                given += 1
                yield Prompt(f"prompt-{number}", epoch, {"number": number})

    def _order(self, epoch: int) -> list[int]:
        order = list(range(self._n))
        if self._shuffle:
            draws = Draws(self._seed, "prompts", epoch)
            order.sort(key=dict(zip(order, (draws.random() for _ in order), strict=True)).__getitem__)
        return order


class RecordingExporter:
    """`protocols.Exporter` that keeps every row, by stream."""

    def __init__(self) -> None:
        self.rows: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
        self.closed = False

    def export(self, stream: str, row: Mapping[str, Any]) -> None:
        """Keep the row."""
        self.rows[stream].append(row)

    def close(self) -> None:
        """Be closed."""
        self.closed = True
