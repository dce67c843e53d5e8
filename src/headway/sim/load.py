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

    `state` "again" is no turn: it stands for all that decode, while what the cache holds of them is prefilled once more.
    `written`: tokens up to where it joined the batch at `joined`; they grow with W while it decodes. `parts`: (written, joined, left) where
    it decoded before.
    """

    __slots__ = ("cached", "context", "end", "goal", "joined", "parts", "prefill", "state", "written")

    def __init__(self, goal: float, context: int = 0, cached: int = 0) -> None:
        self.goal = goal
        self.context = context
        self.cached = cached
        self.state: Literal["new", "waiting", "prefilling", "decoding", "ended", "again"] = "new"
        self.written = self.joined = 0.0
        self.end = 0.0  # W at which it will be done
        self.prefill = 0.0  # seconds that it takes still
        self.parts: list[tuple[float, float, float]] = []


class Load:
    """The sequences of an engine. `work`: the work clock; `preemptions`: how often one was put back."""

    def __init__(self, settings: LoadSettings) -> None:
        self.work = self._held = 0.0
        self.preemptions = 0
        self._settings = settings
        self._line: deque[Sequence] = deque()  # who waits; those that ended are skipped, here and below
        self._prefills: deque[Sequence] = deque()
        self._heap: list[tuple[float, int, Sequence]] = []  # of those that decode, by end
        self._numbers = count()
        self._ages: list[Sequence] = []  # of the batch, the oldest first
        self._batch = self._decoding = 0

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
        while self._prefills and self._prefills[0].state == "again":
            self._prefills.popleft()  # it is all done again
        for one in self._prefills:
            if one.state == "prefilling":
                decoded -= self._tokens(one)
                one.prefill = self._tokens(one) / speed
        if self._decoding:
            self._prefills.appendleft(again := Sequence(0.0))
            again.state, again.prefill = "again", decoded / speed

    def needed(self) -> float:
        """Return the seconds until something happens; infinite: nothing will."""
        prefills = self._next_prefills()
        if not self._batch:
            return inf
        return prefills[0].prefill if prefills else self._until_decoded(self._decoding, self._first_end() - self.work)

    def quiet(self) -> float:
        """Return for how many seconds no sequence is done or put back, if none is added: what is prefilled alone is seen to its place."""
        prefills = self._next_prefills()
        if len(prefills) != 1:
            return self.needed()
        first = prefills[0]
        joins = first.state == "prefilling"
        decoding, work = self._decoding + joins, first.goal - first.written if joins else inf
        if self._decoding:
            work = min(work, self._first_end() - self.work)
        return first.prefill + self._until_decoded(decoding, work)

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

    def _next_prefills(self) -> deque[Sequence]:
        """Return what is to be prefilled, without those at its head that have ended meanwhile."""
        prefills = self._prefills
        while prefills and prefills[0].state not in {"prefilling", "again"}:
            prefills.popleft()
        return prefills

    def _first_end(self) -> float:
        """Return the work clock when the next of those that decode will be done."""
        heap = self._heap
        while heap[0][2].state != "decoding" or heap[0][2].end != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0]

    def _rate_of(self, decoding: int) -> float:
        settings = self._settings
        return settings.tokens_per_second / (1 + decoding / settings.half_speed_at if settings.half_speed_at else 1.0)

    def _until_decoded(self, decoding: int, work: float) -> float:
        """Return the seconds until so many sequences have done so much work, or filled the cache."""
        if (limit := self._settings.kv_tokens) and self._batch > 1:
            work = min(work, max(0.0, limit - self._held) / decoding)
        return work / self._rate_of(decoding)

    def _pass(self, seconds: float) -> None:
        """Let time pass in which nothing happens."""
        if self._prefills:
            self._prefills[0].prefill -= seconds
            return
        work = seconds * self._rate_of(self._decoding)
        self.work += work
        self._held += work * self._decoding

    def _happen(self) -> Sequence | None:
        """Let happen what is due: a prefill is over, the cache is full, or a sequence is done, which is returned."""
        if self._prefills:
            first = self._prefills.popleft()
            if first.state == "prefilling":
                self._join(first)
            return None
        end, _, sequence = self._heap[0]
        if end - self.work > TOKENS_LEFT:
            self._put_back()
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
                if settings.kv_tokens and self._batch and self._held + tokens + self._batch + 1 > settings.kv_tokens + TOKENS_LEFT:
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
        """Put the youngest sequence back to the head of the line; who waits may have room then."""
        while (youngest := self._ages.pop()).state not in {"prefilling", "decoding"}:
            pass
        self._take_out(youngest)
        youngest.state, youngest.cached = "waiting", 0
        self._line.appendleft(youngest)
        self.preemptions += 1
        self._let_in()

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
