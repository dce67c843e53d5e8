"""How an engine writes under load: the arithmetic of `sim.load` on the event loop, with one timer; and the stamps of what is written."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Collection
from math import ceil, inf

from headway.sim.generation import Generation, Spans, Writing
from headway.sim.load import TOKENS_LEFT, Load, LoadSettings, Sequence


class Loaded(Generation):
    """Sequences share the engine. The clock is the work clock, in tokens."""

    def __init__(self, version: int, settings: LoadSettings, deaths: Collection[tuple[float, float]] = ()) -> None:
        super().__init__(version, deaths)
        self._load = Load(settings)
        self._recomputes = settings.recompute_kv
        self._writings: dict[Writing, Sequence] = {}
        self._ends: dict[Sequence, asyncio.Future[bool]] = {}
        self._at = 0.0
        self._sampled = 0  # of turns that have ended

    @property
    def sampled(self) -> int:
        """Tokens written so far, those of turns under way included."""
        self._advance(asyncio.get_running_loop().time())
        return self._sampled + sum(self._whole(writing, sequence) for writing, sequence in self._writings.items())

    @property
    def preemptions(self) -> int:
        """How often a sequence was put back for want of room."""
        return self._load.preemptions

    def clock(self) -> float:
        """Return the work clock."""
        self._advance(asyncio.get_running_loop().time())
        return self._load.work

    def written(self, writing: Writing) -> int:
        """Return how many tokens of a turn under way are written."""
        self._advance(asyncio.get_running_loop().time())
        return self._whole(writing, self._writings[writing])

    async def write(self, writing: Writing) -> Spans | None:
        """Stand in line, be prefilled and decode."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now >= self.dies_at:
            return None
        if now > self._at:
            self._advance(now)
        goal = float(writing.tokens) if writing.until >= writing.seconds else writing.tokens * writing.until / writing.seconds
        sequence = self._writings[writing] = Sequence(goal, writing.context, min(writing.cached, writing.context))
        end = self._ends[sequence] = loop.create_future()
        self._load.add(sequence)
        self._plan()
        self._note(now)
        try:
            alive = await end
        finally:
            now = loop.time()
            if sequence.state != "ended":
                self._advance(now)
                self._load.remove(sequence)
                self._plan()
            writing.ended_with = self._whole(writing, sequence)
            self._sampled += writing.ended_with
            del self._writings[writing], self._ends[sequence]
            self._note(now)
        return self._stamps_of(sequence, writing.tokens) if alive else None

    def pause(self) -> None:
        """Write nothing until `resume`."""
        if not self.paused:
            now = asyncio.get_running_loop().time()
            self._advance(now)
            self.paused = True
            self._note(now)

    def resume(self) -> None:
        """Go on."""
        if self.paused:
            now = asyncio.get_running_loop().time()
            self._advance(now)
            self.paused = False
            self._plan()
            self._note(now)

    def serve(self, version: int) -> None:
        """Write with other weights from now on, and, if the cache is not to be of the old ones, prefill what is in flight again."""
        changes = version != self.version
        super().serve(version)
        if changes and self._recomputes:
            self._load.recompute()
            self._plan()

    def _whole(self, writing: Writing, sequence: Sequence) -> int:
        return min(writing.tokens, int(self._load.progress(sequence) + TOKENS_LEFT))

    def _advance(self, now: float) -> None:
        seconds, self._at = now - self._at, now
        if not self._writings:
            return
        if not self.paused:
            for done in self._load.advance(seconds):
                self._end(done, alive=True)
        if now >= self.dies_at:
            for sequence in self._ends:
                self._load.remove(sequence)
                self._end(sequence, alive=False)

    def _end(self, sequence: Sequence, *, alive: bool) -> None:
        end = self._ends[sequence]
        if not end.done():
            end.set_result(alive)

    def _due(self) -> float:
        if not self._writings:
            return inf
        return self.dies_at if self.paused else min(self.dies_at, self._at + self._load.quiet())

    def _stamps_of(self, sequence: Sequence, tokens: int) -> Spans:
        """Return which version wrote what: each token of a part by its place on the work clock."""
        spans: Spans = []
        for written, joined, left in sequence.parts:
            token = ceil(written - TOKENS_LEFT)
            end = min(tokens, ceil(written + left - joined - TOKENS_LEFT))
            number = bisect_right(self._since, joined + token - written) - 1
            while token < end:
                following = self._since[number + 1] - joined + written if number + 1 < len(self._since) else inf
                until = end if following >= end else ceil(following - TOKENS_LEFT)
                if until > token:
                    if not spans or spans[-1][1] != self._versions[number]:
                        spans.append((token, self._versions[number]))
                    token = until
                number += 1
        return spans
