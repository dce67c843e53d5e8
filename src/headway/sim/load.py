"""An engine under load: sequences share its speed, prefill holds decoding up, and batch and cache are limited. Arithmetic, without a loop.

    work clock W, in tokens of every sequence that decodes:   dW/dt = tokens_per_second / (1 + n / half_speed_at),   n sequences decode
    a sequence that joins at W0 with L tokens left is done at W = W0 + L;   its i-th token is written at W0 + i
    tokens held by the cache: prompts and what is written so far;           they grow by n per unit of W

So the next to be done is the top of one heap, an event costs O(log n), and no token costs anything. Sequences come in first come, first
served: while the batch is full (max_sequences) or the cache has no room for what they hold and one token more of everybody, they wait. One
at a time is prefilled, and nothing decodes meanwhile. When the cache is full, the youngest sequence goes back to the head of the line; it
keeps its tokens and is prefilled again with them. One that is alone is never put back. What decodes can be made to be prefilled once more.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Literal

SECONDS_LEFT = 1e-9  # what rounding leaves of the time until an event
TOKENS_LEFT = 1e-6  # and of a token


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How fast an engine is; 0 means: never slower, no time, no limit. Speeds are tokens a second, `half_speed_at` is in sequences.

    `recompute_kv`: after a weight sync what is in flight is prefilled again.
    """

    tokens_per_second: float
    half_speed_at: float = 0.0
    prefill_tokens_per_second: float = 0.0
    max_sequences: int = 0
    kv_tokens: int = 0
    recompute_kv: bool = True


class Sequence:
    """A turn at a loaded engine: `goal` tokens after `context` others, of which the cache has `cached` already.

    `written`: tokens up to where it joined the batch at `joined`; they grow with W while it decodes. `parts`: (written, joined, left) where
    it decoded before.
    """

    __slots__ = ("cached", "context", "end", "goal", "joined", "parts", "prefill", "state", "written")

    def __init__(self, goal: float, context: int = 0, cached: int = 0) -> None:
        self.goal = goal
        self.context = context
        self.cached = cached
        self.state: Literal["new", "waiting", "prefilling", "decoding", "ended"] = "new"
        self.written = self.joined = 0.0
        self.end = 0.0  # W at which it will be done
        self.prefill = 0.0  # seconds that it takes still
        self.parts: list[tuple[float, float, float]] = []


class Load:
    """The sequences of an engine. `work`: the work clock; `preemptions`: how often one was put back."""

    def __init__(self, settings: LoadSettings) -> None:
        self.work = 0.0
        self.preemptions = 0
        self._settings = settings
        self._line: deque[Sequence] = deque()  # who waits; those that ended are skipped, here and below
        self._prefills: deque[Sequence | float] = deque()  # a number: seconds for what decodes already
        self._heap: list[tuple[float, int, Sequence]] = []  # of those that decode, by end
        self._numbers = count()
        self._ages: list[Sequence] = []  # of the batch, the oldest first
        self._batch = self._decoding = 0
        self._held = 0.0

    def add(self, sequence: Sequence) -> None:
        """Have a sequence stand in line, or come in."""
        sequence.state = "waiting"
        self._line.append(sequence)
        self._let_in()

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence go, done or not."""
        self._take_out(sequence)
        self._let_in()

    def recompute(self) -> None:
        """Have all that is in flight prefilled once more, as what the cache holds is of other weights."""
        speed = self._settings.prefill_tokens_per_second
        for waiting in self._line:
            waiting.cached = 0
        if not speed:
            return
        decoded = self._held
        while self._prefills and not isinstance(self._prefills[0], Sequence):
            self._prefills.popleft()  # it is all done again
        for one in self._prefills:
            if isinstance(one, Sequence) and one.state == "prefilling":
                decoded -= self._tokens(one)
                one.prefill = self._tokens(one) / speed
        if self._decoding:
            self._prefills.appendleft(decoded / speed)

    def needed(self) -> float:
        """Return the seconds until something happens; infinite: nothing will."""
        if not self._batch:
            return inf
        prefills, heap = self._prefills, self._heap
        while prefills and isinstance(first := prefills[0], Sequence) and first.state != "prefilling":
            prefills.popleft()
        if prefills:
            first = prefills[0]
            return first.prefill if isinstance(first, Sequence) else first
        while heap[0][2].state != "decoding" or heap[0][2].end != heap[0][0]:
            heapq.heappop(heap)
        return min(heap[0][0] - self.work, self._room()) / self._rate

    def advance(self, seconds: float) -> list[Sequence]:
        """Let time pass; return the sequences that are done by then."""
        done: list[Sequence] = []
        while (needed := self.needed()) <= seconds + SECONDS_LEFT:
            self._pass(needed)
            if (ended := self._happen()) is not None:
                done.append(ended)
            seconds = max(0.0, seconds - needed)
        if self._batch:
            self._pass(seconds)
        return done

    def progress(self, sequence: Sequence) -> float:
        """Return how many tokens of a sequence are written."""
        return sequence.written + (self.work - sequence.joined if sequence.state == "decoding" else 0.0)

    def _tokens(self, sequence: Sequence) -> float:
        return sequence.context + self.progress(sequence)

    @property
    def _rate(self) -> float:
        settings = self._settings
        slower = 1 + self._decoding / settings.half_speed_at if settings.half_speed_at else 1.0
        return settings.tokens_per_second / slower

    def _room(self) -> float:
        """Return after how much work the cache is full."""
        limit = self._settings.kv_tokens
        return max(0.0, limit - self._held) / self._decoding if limit and self._batch > 1 else inf

    def _pass(self, seconds: float) -> None:
        """Let time pass in which nothing happens."""
        if not self._prefills:
            work = seconds * self._rate
            self.work += work
            self._held += work * self._decoding
        elif isinstance(first := self._prefills[0], Sequence):
            first.prefill -= seconds
        else:
            self._prefills[0] = first - seconds

    def _happen(self) -> Sequence | None:
        """Let happen what is due: a prefill is over, the cache is full, or a sequence is done, which is returned."""
        if self._prefills:
            first = self._prefills.popleft()
            if isinstance(first, Sequence):
                self._join(first)
            return None
        end, _, sequence = self._heap[0]
        if end - self.work > TOKENS_LEFT:
            self._put_back()
            self._let_in()
            return None
        self.work = max(self.work, end)
        self.remove(sequence)
        sequence.written = sequence.goal
        return sequence

    def _let_in(self) -> None:
        """Let in who waits, while there is room."""
        settings, line = self._settings, self._line
        while line:
            first = line[0]
            if first.state == "waiting":
                tokens = self._tokens(first)
                if settings.max_sequences and self._batch >= settings.max_sequences:
                    return
                if settings.kv_tokens and self._batch and self._held + tokens + self._batch + 1 > settings.kv_tokens:
                    return
                self._come_in(first, tokens)
            line.popleft()

    def _come_in(self, sequence: Sequence, tokens: float) -> None:
        self._batch += 1
        self._held += tokens
        sequence.state = "prefilling"
        if self._settings.kv_tokens:
            self._ages.append(sequence)
            if len(self._ages) > 2 * self._batch + 64:
                self._ages = [one for one in self._ages if one.state in {"prefilling", "decoding"}]
        speed = self._settings.prefill_tokens_per_second
        sequence.prefill = (tokens - sequence.cached) / speed if speed else 0.0
        if sequence.prefill or self._prefills:
            self._prefills.append(sequence)
        else:
            self._join(sequence)

    def _join(self, sequence: Sequence) -> None:
        """Have a sequence decode."""
        sequence.state, sequence.joined = "decoding", self.work
        sequence.end = self.work + sequence.goal - sequence.written
        self._decoding += 1
        heapq.heappush(self._heap, (sequence.end, next(self._numbers), sequence))

    def _put_back(self) -> None:
        """Put the youngest sequence back to the head of the line."""
        while (youngest := self._ages.pop()).state not in {"prefilling", "decoding"}:
            pass
        self._take_out(youngest)
        youngest.state, youngest.cached = "waiting", 0
        self._line.appendleft(youngest)
        self.preemptions += 1

    def _take_out(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch, if it is in it."""
        if sequence.state in {"prefilling", "decoding"}:
            self._batch -= 1
            self._held -= self._tokens(sequence)
            if sequence.state == "decoding":
                self._decoding -= 1
                sequence.parts.append((sequence.written, sequence.joined, self.work))
                sequence.written += self.work - sequence.joined
            if not self._batch:
                self._held = 0.0  # and not what rounding left
                self._prefills.clear()
        sequence.state = "ended"
