"""Prompts in a reproducible order, with stable ids.

A finite list (a file, a data set, a function that returns a list) is shuffled anew in each epoch, from (seed, epoch) alone. A stream (a
function that returns an iterator, infinite ones included) is read one row at a time, in a thread, just ahead of need; it cannot be
shuffled, and asking for that is an error rather than a buffer that pretends. Each epoch calls its function again.

A prompt's id is its `id_field`, text or an integer, and its row number where the row has none. Two rows with one id are an error: an id is
what "trained once" is counted by.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.adapters.prompts.rows import read_rows
from headway.entries import load_entry
from headway.errors import ConfigError, HeadwayError, PromptError
from headway.protocols import PromptSource
from headway.settings import PromptsSection
from headway.types import Prompt

_END = object()
_encode = msgspec.msgpack.Encoder().encode


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
    return _Stream(iter(rows), open_rows, settings)


class _Rows:
    """A finite list of rows."""

    def __init__(self, rows: Sequence[Any], settings: PromptsSection, seed: int) -> None:
        if not len(rows):
            raise ConfigError(f"prompts: {settings.source} is empty")
        ids = _Ids(settings)
        self._ids = [ids.of(row, number) for number, row in enumerate(rows)]
        _fields(rows[0], 0, settings)
        self._rows = rows
        self._settings = settings
        self._seed = seed

    def __aiter__(self) -> AsyncIterator[Prompt]:
        return self._prompts()

    async def _prompts(self) -> AsyncIterator[Prompt]:
        epoch = 0
        while not self._settings.epochs or epoch < self._settings.epochs:
            for number in self._order(epoch):
                yield Prompt(self._ids[number], epoch, _fields(self._rows[number], number, self._settings, PromptError))
            epoch += 1

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._settings.shuffle:
            return range(len(self._rows))
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(len(self._rows)).tolist()
        return order


class _Stream:
    """Rows from an iterator, of which the first is read at once: an empty source is an error at the start."""

    def __init__(self, rows: Iterator[Any], again: Callable[[], Any], settings: PromptsSection) -> None:
        self._settings = settings
        self._again = again
        self._rows = rows
        self._thread = _Thread("prompts")
        try:
            self._first = next(rows, _END)
        except Exception as error:
            raise ConfigError(f"prompts: {settings.source} raised {type(error).__name__}: {error}") from error
        if self._first is _END:
            raise ConfigError(f"prompts: {settings.source} is empty")
        _Ids(settings).of(self._first, 0)
        _fields(self._first, 0, settings)

    def __aiter__(self) -> AsyncIterator[Prompt]:
        return self._prompts()

    async def _prompts(self) -> AsyncIterator[Prompt]:
        row: Any = self._first
        rows = self._rows
        epoch = 0
        while True:
            ids = _Ids(self._settings)
            number = 0
            while row is not _END:
                try:
                    prompt = Prompt(ids.of(row, number), epoch, _fields(row, number, self._settings))
                except ConfigError as error:
                    raise PromptError(str(error)) from error
                yield prompt
                number += 1
                row = await self._next(rows)
            epoch += 1
            if epoch == self._settings.epochs:
                return
            rows = await self._restart(rows)
            row = await self._next(rows)
            if row is _END:
                raise PromptError(f"prompts: {self._settings.source} is empty in epoch {epoch}: return a new iterator from each call")

    async def _next(self, rows: Iterator[Any]) -> Any:
        # in a thread: a generator that reads or computes must not stall the loop
        try:
            return await self._thread.call(lambda: next(rows, _END))
        except Exception as error:
            raise PromptError(f"prompts: {self._settings.source} raised {type(error).__name__}: {error}") from error

    async def _restart(self, old: Iterator[Any]) -> Iterator[Any]:
        try:
            rows: Iterator[Any] = iter(await self._thread.call(self._again))
        except Exception as error:
            raise PromptError(f"prompts: {self._settings.source} raised {type(error).__name__}: {error}") from error
        if rows is old:
            raise PromptError(
                f"prompts: {self._settings.source} is used up and cannot be read again: name a function, or set prompts.epochs = 1"
            )
        return rows


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


def _fields(row: Any, number: int, settings: PromptsSection, error: type[HeadwayError] = ConfigError) -> dict[str, Any]:
    """Return the fields of a prompt. Raises `error` for a value that no worker could be sent."""
    try:
        fields = dict(row)
        _encode(fields)
    except (TypeError, ValueError, OverflowError) as refused:
        raise error(
            f"prompts: row {number} of {settings.source} cannot be sent to a worker: {refused}: use text, numbers, lists and dicts"
        ) from refused
    return fields


class _Ids:
    """Gives each row of one epoch its id, and refuses an id that was given before."""

    def __init__(self, settings: PromptsSection) -> None:
        self._settings = settings
        self._given: dict[int, int] = {}  # hash of an id to its row: an endless stream costs about 100 bytes a row

    def of(self, row: Any, number: int) -> str:
        """Return the id of row `number`. Raises `ConfigError`."""
        source, field = self._settings.source, self._settings.id_field
        if not isinstance(row, Mapping):
            raise ConfigError(f"prompts: row {number} of {source} is {type(row).__name__}: each row must be a dict")
        value = row.get(field)
        if value is None:
            value = number
        if not isinstance(value, (str, int)) or isinstance(value, bool):
            raise ConfigError(f'prompts: row {number} of {source} has {value!r} as "{field}": an id is a text or an integer')
        identity = str(value)
        earlier = self._given.setdefault(hash(identity), number)
        if earlier != number:
            raise ConfigError(f'prompts: rows {earlier} and {number} of {source} have the same id "{identity}": ids must be unique')
        return identity
