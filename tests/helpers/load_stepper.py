"""A stepper of an engine under load that knows no work clock and no heap: it moves every sequence by hand, event by event."""

from dataclasses import dataclass, field
from math import ceil, inf

CLOSE = 1e-6


@dataclass(eq=False)
class Turn:
    """A turn in a script: it comes at a time, and may be given up at another; and what becomes of it."""

    at: float
    context: int
    tokens: int
    gives_up: float = inf
    written: float = 0.0
    prefill: float = 0.0
    ended: float = inf
    versions: list = field(default_factory=list)  # of each token

    @property
    def held(self):
        return self.context + self.written


class Stepper:
    """Goes from event to event and moves every sequence by hand."""

    def __init__(self, load, turns, syncs, looks=()):
        self.load, self.turns, self.looks = load, turns, list(looks)
        self.now, self.version, self.paused, self.preemptions = 0.0, 0, False, 0
        self.line, self.batch, self.prefilling = [], [], []
        self.again = None  # seconds of prefill for what decodes already
        self.seen = []
        script = [(start, 0, "pause", None) for start, _ in syncs] + [(end, 2, "commit", None) for _, end in syncs]
        script += [(turn.at, 1, "comes", turn) for turn in turns] + [(at, 4, "look", None) for at in looks]
        script += [(turn.gives_up, 3, "goes", turn) for turn in turns if turn.gives_up < inf]
        self.script = sorted(script, key=lambda event: event[:2])

    def run(self):
        while self.script or self.batch:
            due, until = self.due(), self.script[0][0] - self.now if self.script else inf
            if due <= until + 1e-9:
                self.pass_by(due)
                self.happen()
            else:
                self.pass_by(until)
                self.now, _, what, turn = self.script.pop(0)
                getattr(self, what)(turn)
            self.let_in()
        return self

    def due(self):
        if self.paused or not self.batch:
            return inf
        if self.again is not None:
            return self.again
        if self.prefilling:
            return self.prefilling[0].prefill
        return min(*(turn.tokens - turn.written for turn in self.batch), self.room()) / self.rate

    @property
    def decoding(self):
        return [turn for turn in self.batch if turn not in self.prefilling]

    @property
    def rate(self):
        slower = 1 + len(self.decoding) / self.load.half_speed_at if self.load.half_speed_at else 1
        return self.load.tokens_per_second / slower

    def room(self):
        if not self.load.kv_tokens or len(self.batch) < 2:
            return inf
        return max(0.0, self.load.kv_tokens - sum(turn.held for turn in self.batch)) / len(self.batch)

    def pass_by(self, seconds):
        self.now += seconds
        if self.paused or not self.batch:
            return
        if self.again is not None:
            self.again -= seconds
        elif self.prefilling:
            self.prefilling[0].prefill -= seconds
        else:
            rate = self.rate
            for turn in self.batch:
                before, turn.written = turn.written, turn.written + seconds * rate
                turn.versions += [self.version] * (ceil(turn.written - CLOSE) - ceil(before - CLOSE))

    def happen(self):
        if self.again is not None:
            self.again = None
        elif self.prefilling:
            self.prefilling.pop(0)
        elif done := [turn for turn in self.batch if turn.tokens - turn.written <= CLOSE]:
            done[0].written = done[0].tokens
            self.leaves(done[0])
        else:
            self.preemptions += 1
            self.line.insert(0, self.batch.pop())

    def let_in(self):
        while self.line:
            first, batch = self.line[0], self.batch
            if self.load.max_sequences and len(batch) >= self.load.max_sequences:
                return
            held = sum(turn.held for turn in batch)
            if self.load.kv_tokens and batch and held + first.held + len(batch) + 1 > self.load.kv_tokens + CLOSE:
                return
            batch.append(self.line.pop(0))
            first.prefill = first.held / self.load.prefill_tokens_per_second if self.load.prefill_tokens_per_second else 0.0
            if first.prefill or self.prefilling:
                self.prefilling.append(first)

    def leaves(self, turn):
        turn.ended = self.now
        for places in (self.line, self.batch, self.prefilling):
            if turn in places:
                places.remove(turn)
        if not self.batch:
            self.again = None

    def comes(self, turn):
        self.line.append(turn)

    def goes(self, turn):
        if turn.ended == inf:
            self.leaves(turn)

    def look(self, _):
        self.seen.append(sum(int(turn.written + CLOSE) for turn in self.turns))

    def pause(self, _):
        self.paused = True

    def commit(self, _):
        self.paused = False
        self.version += 1
        speed = self.load.prefill_tokens_per_second
        if self.load.recompute_kv and speed and self.batch:
            self.again = sum(turn.held for turn in self.decoding) / speed if self.decoding else None
            for turn in self.prefilling:
                turn.prefill = turn.held / speed
