"""The prompt feed: prompts that must be tried again first, then the source; it ends when no further prompt can come.

A prompt is requeued when its group went stale without training. The feed ends when the source has ended *and* no live group could still
send a prompt back, or when the run drains, even if the source is slow to give its next prompt or never does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from headway.errors import HeadwayError, PromptError
from headway.flow.watch import Watch
from headway.protocols import PromptSource
from headway.types import AnyEvent, Prompt, SourceExhausted


class PromptFeed:
    """An asynchronous iterator of prompts with a way back in."""

    def __init__(self, source: PromptSource, *, watch: Watch, record: Callable[[AnyEvent], None], clock: Callable[[], float]) -> None:
        self._source = aiter(source)
        self._watch = watch
        self._record = record
        self._clock = clock
        self._requeued: deque[Prompt] = deque()
        self._exhausted = False
        self.taken = 0

    def requeue(self, prompt: Prompt) -> None:
        """Put a prompt back, before all others. Call it in the same breath in which its group's drop is recorded."""
        self._requeued.append(prompt)

    def __aiter__(self) -> AsyncIterator[Prompt]:
        return self

    async def __anext__(self) -> Prompt:
        ledger = self._watch.now
        while not ledger.draining:
            if self._requeued:
                return self._requeued.popleft()
            if not self._exhausted:
                prompt = await self._next_of_source()
                if prompt is not None:
                    return prompt
            elif ledger.running or ledger.ready:
                await self._watch.until(lambda now: bool(self._requeued or now.draining or not (now.running or now.ready)))
            else:
                break
        raise StopAsyncIteration

    async def _next_of_source(self) -> Prompt | None:
        """Return the source's next prompt; None when it has none, or when the run drains before it comes."""
        pull = asyncio.create_task(_next(self._source))
        pull.add_done_callback(lambda _: self._watch.touch())
        try:
            await self._watch.until(lambda now: pull.done() or bool(now.draining))
            if not pull.done():
                return None
            prompt = pull.result()
        except HeadwayError:
            raise
        except Exception as error:
            raise PromptError(f"prompts: the source failed after {self.taken} prompts: {type(error).__name__}: {error}") from error
        finally:
            pull.cancel()
        if prompt is None:
            self._exhausted = True
            self._record(SourceExhausted(self._clock()))
        else:
            self.taken += 1
        return prompt


async def _next(source: AsyncIterator[Prompt]) -> Prompt | None:
    return await anext(source, None)
