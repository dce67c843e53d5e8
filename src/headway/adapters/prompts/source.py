"""Prompts in a reproducible order, with stable ids.

A finite list (a file, a data set, a function that returns a list) is shuffled anew in each epoch, from (seed, epoch) alone. A stream (a
function that returns an iterator, infinite ones included) is read one row at a time, in a thread, just ahead of need; it cannot be
shuffled, and asking for that is an error rather than a buffer that pretends. Each epoch calls its function again.

A prompt's id is its `id_field`, text or an integer, and its row number where the row has none. Two rows with one id are an error: an id is
what "trained once" is counted by, and what a run that is taken up again goes by.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway.adapters.prompts.identity import Ids, fields_of
from headway.adapters.prompts.rows import read_rows
from headway.adapters.prompts.stream import Stream
from headway.entries import load_entry
from headway.errors import ConfigError, HeadwayError, PromptError
from headway.protocols import PromptSource
from headway.settings import PromptsSection
from headway.types import DataPosition, Prompt


def open_source(settings: PromptsSection, base: Path, seed: int) -> PromptSource:
    """Open the source that `settings` names; paths and modules are relative to `base`, the config file's directory.

    Raises `ConfigError` for what cannot be read, an empty source, a duplicate id, and a stream that is to be shuffled.
    """
    if ":" not in settings.source:
        return _Rows(read_rows(base / settings.source), settings, seed)
    found = load_entry(settings.source, base, key="prompts")
    open_rows: Callable[[], Any] = found if callable(found) else lambda: found
    try:
        rows = open_rows()
    except HeadwayError:
        raise
    except Exception as error:
        raise ConfigError(f"prompts: {settings.source}() raised {type(error).__name__}: {error}") from error
    if isinstance(rows, Sequence) and not isinstance(rows, str):
        return _Rows(rows, settings, seed)
    if not isinstance(rows, Iterable) or isinstance(rows, (str, Mapping)):
        raise ConfigError(f"prompts: {settings.source} gives {type(rows).__name__}: it must be a list or an iterator of dicts")
    if settings.shuffle:
        raise ConfigError(
            f"prompts: {settings.source} gives an iterator, which cannot be shuffled: set prompts.shuffle = false, or return a list"
        )
    return Stream(iter(rows), open_rows, settings)


class _Rows:
    """A finite list of rows."""

    def __init__(self, rows: Sequence[Any], settings: PromptsSection, seed: int) -> None:
        if not len(rows):
            raise ConfigError(f"prompts: {settings.source} is empty")
        ids = Ids(settings)
        self._ids = [ids.of(row, number) for number, row in enumerate(rows)]
        fields_of(rows[0], 0, settings)
        self._rows = rows
        self._settings = settings
        self._seed = seed

    def __aiter__(self) -> AsyncIterator[Prompt]:
        return self.after(DataPosition())

    async def after(self, position: DataPosition) -> AsyncIterator[Prompt]:
        """Yield what is left: first what waits to be tried again, oldest epoch first, then the rest, all in the order of the epochs."""
        waiting = position.waiting
        for epoch in sorted({epoch for _, epoch in waiting}):
            for number in self._order(epoch):
                if (tries := waiting.get((self._ids[number], epoch))) is not None:
                    yield self._prompt(number, epoch, tries)
        epoch = position.epoch
        while not self._settings.epochs or epoch < self._settings.epochs:
            for number in self._order(epoch):
                identity = self._ids[number]
                if position.has_left(identity, epoch) and (identity, epoch) not in waiting:
                    yield self._prompt(number, epoch)
            epoch += 1

    async def find(self, wanted: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], Prompt]:
        """Return those of the wanted prompts whose ids are still there."""
        numbers = {identity: number for number, identity in enumerate(self._ids)}
        return {(identity, epoch): self._prompt(numbers[identity], epoch) for identity, epoch in wanted if identity in numbers}

    def _prompt(self, number: int, epoch: int, tries: int = 0) -> Prompt:
        return Prompt(self._ids[number], epoch, fields_of(self._rows[number], number, self._settings, PromptError), tries)

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._settings.shuffle:
            return range(len(self._rows))
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(len(self._rows)).tolist()
        return order
