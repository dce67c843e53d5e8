"""Prompts out of nothing, and an exporter that remembers: the two ends of a simulated run."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, MutableSequence
from functools import partial
from itertools import count
from typing import Any

from headway.errors import PromptError
from headway.sim.chance import Draws
from headway.types import DataPosition, Prompt


class ListPrompts:
    """`n` prompts, `epochs` times (0: without end), each epoch in an order of its own that the seed fixes. `n` 0: a new one each time.

    `fails_after`: the source fails once it has given so many prompts.
    """

    def __init__(self, n: int, *, epochs: int = 0, seed: int = 0, shuffle: bool = True, fails_after: int | None = None) -> None:
        self._n = n
        self._epochs = epochs
        self._seed = seed
        self._shuffle = shuffle
        self._fails_after = fails_after

    def __aiter__(self) -> AsyncIterator[Prompt]:
        return self.after(DataPosition())

    async def after(self, position: DataPosition) -> AsyncIterator[Prompt]:
        """Yield what is left: first what waits to be tried again, oldest epoch first, then the rest, all in the order of the epochs."""
        for given, prompt in enumerate(self._left(position)):
            if given == self._fails_after:
                raise PromptError(f"the prompt source failed after {given} prompts, as the simulation's settings say")
            yield prompt

    async def find(self, wanted: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], Prompt]:
        """Return those of the wanted prompts that are there."""
        if not self._n:
            return {(name, epoch): _prompt(_number(name), epoch) for name, epoch in wanted}
        numbers = {f"prompt-{number}": number for number in range(self._n)}
        return {(name, epoch): _prompt(numbers[name], epoch) for name, epoch in wanted if name in numbers}

    def _left(self, position: DataPosition) -> Iterator[Prompt]:
        waiting = position.waiting
        if not self._n:
            yield from (_prompt(_number(name), epoch, tries) for (name, epoch), tries in waiting.items())
            yield from (_prompt(number, 0) for number in count() if f"prompt-{number}" not in position.consumed)
        for epoch in sorted({epoch for _, epoch in waiting}):
            for number in self._order(epoch):
                if (tries := waiting.get((f"prompt-{number}", epoch))) is not None:
                    yield _prompt(number, epoch, tries)
        for epoch in range(position.epoch, self._epochs) if self._epochs else count(position.epoch):
            for number in self._order(epoch):
                name = f"prompt-{number}"
                if position.has_left(name, epoch) and (name, epoch) not in waiting:
                    yield _prompt(number, epoch)

    def _order(self, epoch: int) -> list[int]:
        order = list(range(self._n))
        if self._shuffle:
            draws = Draws(self._seed, "prompts", epoch)
            order.sort(key=dict(zip(order, (draws.random() for _ in order), strict=True)).__getitem__)
        return order


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _prompt(number: int, epoch: int, tries: int = 0) -> Prompt:
    return Prompt(f"prompt-{number}", epoch, {"number": number}, tries)


class RecordingExporter:
    """`protocols.Exporter` that keeps every row, by stream; or the newest `keep` of each."""

    def __init__(self, keep: int = 0) -> None:
        self.rows: defaultdict[str, MutableSequence[Mapping[str, Any]]] = defaultdict(partial(deque, maxlen=keep) if keep else list)
        self.closed = False

    def export(self, stream: str, row: Mapping[str, Any]) -> None:
        """Keep the row."""
        self.rows[stream].append(row)

    def close(self) -> None:
        """Be closed."""
        self.closed = True
