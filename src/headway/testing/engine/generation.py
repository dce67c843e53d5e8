"""One generation of the fake engine: token by token in its own time, each stamped with the weights of its moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from headway.testing.engine.sampling import Sampler


@dataclass(slots=True)
class Written:
    """What has been sampled so far: ids, logprobs, and per token the label that was served and the version that was loaded.

    `loaded` is -1 for the weights of the start, -2 for a mixture.
    `hits`, `stale`: blocks of the prompt that were cached, and those of them that other weights had filled.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    finish: str = "abort"
    hits: int = 0
    stale: int = 0

    def label_spans(self) -> list[tuple[str, int, int]]:
        """Return (label, start, end) over the tokens."""
        return [(self.labels[start], start, end) for start, end in _runs(self.labels)]

    def loaded_spans(self) -> list[tuple[int, int, int]]:
        """Return (version, start, end) over the tokens."""
        return [(self.loaded[start], start, end) for start, end in _runs(self.loaded)]


def _runs(values: list[Any]) -> list[tuple[int, int]]:
    starts = [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1]]
    return list(pairwise([*starts, len(values)])) if values else []


class Generation:
    """A generation under way. `abort` ends it with what it has written; cancelling `run` (the client has gone) ends it with nothing."""

    def __init__(self, sampler: Sampler, ids: list[int], finish: str, *, token_seconds: float, seconds: float) -> None:
        self.written = Written()
        self.started = False
        self._sampler = sampler
        self._ids = ids
        self._finish = finish
        self._token_seconds = token_seconds
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None
        self._aborted = False

    def abort(self) -> None:
        """End it now, as the engine does; what it has written so far is its answer."""
        self._aborted = True
        if self._task is not None:
            self._task.cancel()

    async def run(self, *, deaf: bool = False) -> Written:
        """Write to the end and return what was written; cancelled with its caller, unless it is `deaf`."""
        self._task = asyncio.create_task(self._write())
        try:
            await asyncio.wait({self._task})
        finally:
            if not deaf:
                self._task.cancel()
        if not self._task.cancelled():
            self._task.result()
        return self.written

    def when_over(self, then: Callable[[], None]) -> None:
        """Call `then` once nothing is written any more: now, but for one that is deaf and goes on."""
        if self._task is None or self._task.done() or self._task.cancelling():
            then()
        else:
            self._task.add_done_callback(lambda _: then())

    async def _write(self) -> None:
        sampler, written = self._sampler, self.written
        weights = sampler.weights
        await weights.admits.wait()
        if self._aborted:
            return
        self.started = True
        written.hits, written.stale = weights.cached(sampler.call.salt, sampler.call.prompt, sampler.script.cache_block)
        context, stale, recomputations = weights.mark, written.stale > 0, weights.recomputations
        if self._seconds:
            await asyncio.sleep(self._seconds)
        for planned in self._ids:
            if self._token_seconds:
                await asyncio.sleep(self._token_seconds)
            await weights.decodes.wait()  # an abort cancels this task
            if recomputations != weights.recomputations:
                context, stale, recomputations = weights.mark, False, weights.recomputations
            is_stale = stale or context != weights.mark
            token = sampler.token(planned, written.ids, stale=is_stale)
            written.logprobs.append(sampler.logprob(token, len(written.ids), stale=is_stale))
            written.ids.append(token)
            written.labels.append(weights.label)
            written.loaded.append(-1 if weights.loaded is None else weights.loaded)
            if token in sampler.stops:
                written.finish = "stop"
                return
        written.finish = self._finish
