"""The prompt feed: prompts that must be tried again first, then the source; it ends when no further prompt can come.

`run` reads the source a little ahead, so that a prompt is there when the gate opens. A prompt is requeued when its group is dropped and
it is to be tried again. The feed ends when the source has ended *and* no live group could still send a prompt back, or when the run
drains, even if the source is slow to give its next prompt or never does. Prompts in quarantine are passed over, in every epoch; a source
of which a whole epoch is in quarantine has ended.

A run that is taken up again reads what its position has left, prompts to be tried again among it. Those that the source no longer has are
recorded as missing once the source is past their epoch: nothing waits for them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from math import inf

import msgspec

from headway.errors import HeadwayError, PromptError
from headway.events import AnyEvent, PromptDropped, SourceExhausted
from headway.flow.watch import Watch
from headway.protocols import PromptSource
from headway.rules.view import LedgerView
from headway.types import DataPosition, Prompt

READ_AHEAD = 64  # prompts held in memory; what is not admitted yet is not consumed


class PromptFeed:
    """An asynchronous iterator of prompts with a way back in. `position`: what an earlier process of this run has left; None: it is new."""

    def __init__(
        self,
        source: PromptSource,
        *,
        watch: Watch,
        record: Callable[[AnyEvent], None],
        clock: Callable[[], float],
        position: DataPosition | None = None,
    ) -> None:
        self._source = source
        self._watch = watch
        self._record = record
        self._clock = clock
        self._position = position
        self._expected = {} if position is None else dict.fromkeys(position.waiting)  # to be tried again, and not read yet
        self._requeued: deque[Prompt] = deque()
        self._ahead: deque[Prompt] = deque()
        self._room = asyncio.Event()
        self._ended = False

    async def run(self) -> None:
        """Read the source to its end, never more than READ_AHEAD prompts ahead. Raises PromptError when the source fails."""
        read = 0
        good = 0 if self._position is None else self._position.epoch  # the newest epoch with a prompt that may be tried
        try:
            async for prompt in aiter(self._source) if self._position is None else self._source.after(self._position):
                read += 1
                if prompt.id not in self._watch.now.quarantined:
                    good = max(good, prompt.epoch)
                elif prompt.epoch > good + 1:
                    break
                self._expected.pop((prompt.id, prompt.epoch), None)
                self._give_up_before(prompt.epoch)
                self._ahead.append(prompt)
                self._watch.touch()
                while len(self._ahead) >= READ_AHEAD:
                    self._room.clear()
                    await self._room.wait()
        except HeadwayError:
            raise
        except Exception as error:
            raise PromptError(f"prompts: the source failed after {read} prompts: {type(error).__name__}: {error}") from error
        self._give_up_before(inf)
        self._ended = True
        self._watch.touch()

    def requeue(self, prompt: Prompt) -> None:
        """Put a prompt back, before all others, once its group's drop is recorded."""
        self._requeued.append(msgspec.structs.replace(prompt, tries=prompt.tries + 1))
        self._watch.touch()

    def __aiter__(self) -> AsyncIterator[Prompt]:
        return self

    async def __anext__(self) -> Prompt:
        ledger = self._watch.now
        while not ledger.draining:
            prompt = self._next()
            if prompt is not None:
                if prompt.id not in ledger.quarantined:
                    return prompt
            elif not self._ended:
                await self._watch.until(lambda now: bool(self._requeued or self._ahead or self._ended or now.draining))
            else:
                if not ledger.exhausted:
                    self._record(SourceExhausted(self._clock()))
                if not _may_come_back(ledger):
                    break
                await self._watch.until(lambda now: bool(self._requeued or now.draining or not _may_come_back(now)))
        raise StopAsyncIteration

    def _next(self) -> Prompt | None:
        if self._requeued:
            return self._requeued.popleft()
        if not self._ahead:
            return None
        self._room.set()
        return self._ahead.popleft()

    def _give_up_before(self, epoch: float) -> None:
        """Record the prompts of earlier epochs that the source should have given by now as missing."""
        if not self._expected:
            return
        for prompt_id, of_epoch in [prompt for prompt in self._expected if prompt[1] < epoch]:
            del self._expected[prompt_id, of_epoch]
            if (prompt_id, of_epoch) in self._watch.now.waiting:
                detail = "it was to be tried again, and the prompt source no longer has it"
                self._record(PromptDropped(self._clock(), prompt_id, of_epoch, "missing", detail))


def _may_come_back(ledger: LedgerView) -> bool:
    """Whether a prompt may still be sent back: of a live group, or of one that was dropped and whose prompt is on its way."""
    return bool(ledger.running or ledger.ready or ledger.waiting_prompts)
