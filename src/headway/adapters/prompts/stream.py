"""Prompts from an iterator, endless ones included: one row at a time, in a thread, just ahead of need.

A stream has no places to go to: what a run that is taken up again has had already is read once more and skipped, by id, without a look at
its other fields.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from headway.adapters.prompts.identity import Ids, fields_of
from headway.errors import ConfigError, PromptError
from headway.settings import PromptsSection
from headway.types import DataPosition, Prompt

_END = object()
_ROWS_AT_ONCE = 10_000  # skipped in one call of the thread, about: who cancels does not wait for an endless stream
PATIENCE = 1_000_000  # rows in a row without one that is looked for: then the stream no longer has it


class Stream:
    """Rows from an iterator, of which the first is read at once: an empty source is an error at the start."""

    def __init__(self, rows: Iterator[Any], again: Callable[[], Any], settings: PromptsSection) -> None:
        self._settings = settings
        self._again = again
        self._thread = _Thread("prompts")
        try:
            first = next(rows, _END)
        except Exception as error:
            raise ConfigError(f"prompts: {settings.source} raised {type(error).__name__}: {error}") from error
        if first is _END:
            raise ConfigError(f"prompts: {settings.source} is empty")
        Ids(settings).of(first, 0)
        fields_of(first, 0, settings)
        self._source = rows  # as it was given
        self._rows: Iterator[Any] = chain([first], rows)

    def __aiter__(self) -> AsyncIterator[Prompt]:
        return self.after(DataPosition())

    async def after(self, position: DataPosition) -> AsyncIterator[Prompt]:
        """Yield what is left, in the stream's order: where a prompt waits to be tried again, that is before the rest of its epoch."""
        epochs, waiting = self._settings.epochs, position.waiting
        last = max([epochs - 1, *(epoch for _, epoch in waiting)])  # of epochs that there are no more, what waits is left
        epoch = position.first_epoch
        rows = self._rows
        while not epochs or epoch <= last:

            def is_left(identity: str, epoch: int = epoch) -> bool:
                return position.has_left(identity, epoch) if not epochs or epoch < epochs else (identity, epoch) in waiting

            reading = _Epoch(rows, self._settings, is_left)
            while (prompt := await self._next(reading, epoch, position)) is not None:
                yield prompt
            if not reading.read:
                raise PromptError(f"prompts: {self._settings.source} is empty in epoch {epoch}: return a new iterator from each call")
            epoch += 1
            if epochs and epoch > last:
                return
            rows = await self._restarted()

    async def find(self, wanted: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], Prompt]:
        """Return those of the wanted prompts that the stream still brings; read on as long as new ones are found now and then."""
        found: dict[tuple[str, int], Prompt] = {}
        for epoch in sorted({epoch for _, epoch in wanted}):
            ids = {identity for identity, one in wanted if one == epoch}
            await self._find(ids, epoch, found)
        return found

    async def _find(self, ids: set[str], epoch: int, found: dict[tuple[str, int], Prompt]) -> None:
        rows, kept = await self._rows_to_look_through()
        reading = _Epoch(rows, self._settings, ids.__contains__, kept)
        while ids and reading.skipped < PATIENCE:
            row = await self._call(reading.next_left)
            if row is _END:
                break
            if row is not None:
                identity, number, fields = row
                reading.skipped = 0
                ids.discard(identity)
                found[identity, epoch] = Prompt(identity, epoch, fields_of(fields, number, self._settings, PromptError))
        if kept is not None:
            self._rows = chain(kept, rows)

    async def _rows_to_look_through(self) -> tuple[Iterator[Any], list[Any] | None]:
        """Return an iterator that nobody else reads; or the only one there is, and a list of what is read of it, to be read again."""
        rows: Iterator[Any] = await self._call(lambda: iter(self._again()))
        return (rows, None) if rows is not self._source else (self._rows, [])

    async def _next(self, reading: _Epoch, epoch: int, position: DataPosition) -> Prompt | None:
        while True:
            row = await self._call(reading.next_left)
            if row is _END:
                return None
            if row is not None:
                identity, number, fields = row
                tries = position.waiting.get((identity, epoch), 0)
                return Prompt(identity, epoch, fields_of(fields, number, self._settings, PromptError), tries)

    async def _call(self, function: Callable[[], Any]) -> Any:
        # in a thread: a generator that reads or computes must not stall the loop
        try:
            return await self._thread.call(function)
        except ConfigError as error:
            raise PromptError(str(error)) from error
        except Exception as error:
            raise PromptError(f"prompts: {self._settings.source} raised {type(error).__name__}: {error}") from error

    async def _restarted(self) -> Iterator[Any]:
        rows: Iterator[Any] = await self._call(lambda: iter(self._again()))
        if rows is self._source:
            raise PromptError(
                f"prompts: {self._settings.source} is used up and cannot be read again: name a function, or set prompts.epochs = 1"
            )
        return rows


class _Epoch:
    """The rows of one epoch of which `is_left` wants the id; `kept` takes what is read. Used in the stream's thread."""

    def __init__(
        self, rows: Iterator[Any], settings: PromptsSection, is_left: Callable[[str], bool], kept: list[Any] | None = None
    ) -> None:
        self._rows = rows
        self._ids = Ids(settings)
        self._is_left = is_left
        self._kept = kept
        self.read = 0
        self.skipped = 0  # since the last one that was wanted

    def next_left(self) -> Any:
        """Return the next row that is left, as (id, number, row); None: there was none among many; _END: there is none."""
        for _ in range(_ROWS_AT_ONCE):
            row = next(self._rows, _END)
            if row is _END:
                return _END
            if self._kept is not None:
                self._kept.append(row)
            number = self.read
            self.read += 1
            identity = self._ids.of(row, number)
            if self._is_left(identity):
                return identity, number, row
            self.skipped += 1
        return None


class _Thread:
    """One thread for code that may take its time or never return: nobody waits for it at the end of a run."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]] = queue.SimpleQueue()
        self._name = name
        self._started = False

    async def call(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns, raise what it raises."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._work.put((function, answer, loop))
        return await answer

    def _run(self) -> None:
        while True:
            function, answer, loop = self._work.get()
            result, error = None, None
            try:
                result = function()
            except Exception as raised:  # noqa: BLE001 - carried to the caller
                error = raised
            with suppress(RuntimeError):  # the loop is closed: the run has ended meanwhile
                loop.call_soon_threadsafe(_settle, answer, result, error)
            del function, answer, loop, result, error  # waiting for the next, it holds on to nothing


def _settle(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if answer.done():  # cancelled
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
