"""The prompt feed: prompts that must be tried again first, then the source; it ends when no further prompt can come.

`run` reads the source a little ahead, so that a prompt is there when the gate opens. A prompt is requeued when its group went stale without
training. The feed ends when the source has ended *and* no live group could still send a prompt back, or when the run drains, even if the
source is slow to give its next prompt or never does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec

from headway.errors import HeadwayError, PromptError
from headway.events import AnyEvent, SourceExhausted
from headway.flow.watch import Watch
from headway.protocols import PromptSource
from headway.rules.view import LedgerView
from headway.types import Prompt

READ_AHEAD = 64  # prompts held in memory; what is not admitted yet is not consumed


class PromptFeed:
    """An asynchronous iterator of prompts with a way back in."""

    def __init__(self, source: PromptSource, *, watch: Watch, record: Callable[[AnyEvent], None], clock: Callable[[], float]) -> None:
        self._source = source
        self._watch = watch
        self._record = record
        self._clock = clock
        self._requeued: deque[Prompt] = deque()
        self._ahead: deque[Prompt] = deque()
        self._room = asyncio.Event()
        self._ended = False

    async def run(self) -> None:
        """Read the source to its end, never more than READ_AHEAD prompts ahead. Raises PromptError when the source fails."""
        read = 0
        try:
            async for prompt in self._source:
                read += 1
                self._ahead.append(prompt)
                self._watch.touch()
                while len(self._ahead) >= READ_AHEAD:
                    self._room.clear()
                    await self._room.wait()
        except HeadwayError:
            raise
        except Exception as error:
            raise PromptError(f"prompts: the source failed after {read} prompts: {type(error).__name__}: {error}") from error
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
            if self._requeued:
                return self._requeued.popleft()
            if self._ahead:
                self._room.set()
                return self._ahead.popleft()
            if not self._ended:
                await self._watch.until(lambda now: bool(self._requeued or self._ahead or self._ended or now.draining))
                continue
            if not ledger.exhausted:
                self._record(SourceExhausted(self._clock()))
            if not _may_come_back(ledger):
                break
            await self._watch.until(lambda now: bool(self._requeued or now.draining or not _may_come_back(now)))
        raise StopAsyncIteration


def _may_come_back(ledger: LedgerView) -> bool:
    """Whether a prompt may still be sent back: of a live group, or of one that was dropped and whose prompt is on its way."""
    return bool(ledger.running or ledger.ready or ledger.waiting_prompts)
