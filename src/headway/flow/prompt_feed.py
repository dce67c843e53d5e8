"""The prompt feed: prompts that must be tried again first, then the source; it ends when no further prompt can come.

A prompt is requeued when its group went stale without training. The feed ends when the source has ended *and* no live group could still
send a prompt back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable

from headway.errors import HeadwayError, PromptError
from headway.flow.watch import Watch
from headway.protocols import PromptSource
from headway.types import AnyEvent, Prompt, SourceExhausted


class PromptFeed:
    """An asynchronous iterator of prompts with a way back in."""

    def __init__(self, source: PromptSource, *, watch: Watch, record: Callable[[AnyEvent], None], clock: Callable[[], float]) -> None:
        self._source = source
        self._watch = watch
        self._record = record
        self._clock = clock
        self._requeued: deque[Prompt] = deque()
        self.taken = 0

    def requeue(self, prompt: Prompt) -> None:
        """Put a prompt back, before all others. Call it in the same breath in which its group's drop is recorded."""
        self._requeued.append(prompt)

    async def __aiter__(self) -> AsyncIterator[Prompt]:
        source = aiter(self._source)
        while not self._watch.now.draining:
            if self._requeued:
                yield self._requeued.popleft()
                continue
            try:
                prompt = await anext(source)
            except StopAsyncIteration:
                break
            except HeadwayError:
                raise
            except Exception as error:
                raise PromptError(f"prompts: the source failed after {self.taken} prompts: {type(error).__name__}: {error}") from error
            self.taken += 1
            yield prompt
        self._record(SourceExhausted(self._clock()))
        while not self._watch.now.draining:
            await self._watch.until(lambda now: bool(self._requeued or now.draining or not (now.running or now.ready)))
            if not self._requeued:
                return
            yield self._requeued.popleft()
