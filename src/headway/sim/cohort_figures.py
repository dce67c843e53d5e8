"""What the cohort stepper notes of a run, and the figures that it makes of it; the tokens of batches are counted by `cohort_counts`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

from headway.sim.cohort_counts import Served, TokenCounts, cells_of
from headway.sim.cohort_units import ROUNDING, Ints
from headway.sim.distributions import Floats
from headway.sim.scenario import Scenario, drawn, warm_up_of
from headway.sim.summary import BYTES_PER_TOKEN, LengthBias, Summary, Tokens, staleness_of

_CHUNK = 1 << 16  # rollouts counted at once: enough for numpy, and few enough for the cache
_NOTHING = "the gate is closed by staleness"


class Published(NamedTuple):
    """A version is served: since when, on the generation clock and on the wall's."""

    generated: float
    wall: float
    version: int


class Formed(NamedTuple):
    """Batch k, trained at `done` after `seconds` (wall clock); `starts` [units] and `tokens` [units, members]."""

    k: int
    done: float
    seconds: float
    starts: Floats
    tokens: Floats


class Mark(NamedTuple):
    """Sums up to an instant: seconds of generation of all rollouts, those in which none was in flight, and rollouts x pause seconds."""

    generated: float = 0.0
    idle: float = 0.0
    held: float = 0.0


class CohortBooks:
    """Counts over a run. Only batches after the warm-up are counted, and what happened while they were trained."""

    def __init__(self, scenario: Scenario, *, masks: bool) -> None:
        self._masks, self._bound = masks, scenario.rollout.max_staleness
        self._prompt_tokens = drawn(scenario.workload.prompt_tokens).mean
        self._first = warm_up_of(scenario)
        self._began = 0.0 if self._first == 0 else np.inf  # when the batch before the first was trained
        self._done = 0.0
        self._served = Served([], [], [])
        self._publications = 0
        self._chunk: list[Formed] = []
        self._in_chunk = 0
        self._counts = TokenCounts(scenario.fleet.tokens_per_second, self._bound if masks else None)
        self._batches = 0
        self._training = self._paused = 0.0
        self._started, self._ended = Mark(), Mark()
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._lost: Counter[str] = Counter()
        self._most_in_flight = self._most_ready = 0
        self._most_waiting = 0.0
        self._closed: defaultdict[str, float] = defaultdict(float)

    def served_since(self, version: int) -> float:
        """Return since when nothing older than a version is served, on the generation clock; infinite: it is not served yet."""
        if version <= 0:
            return -np.inf
        index = bisect_left(self._served.versions, version)
        return self._served.since[index] if index < len(self._served.versions) else np.inf

    def wall_of(self, generated: float) -> float:
        """Return what the wall clock showed at an instant of the generation clock; when a sync begins there, as it begins."""
        index = bisect_left(self._served.since, generated) - 1
        return generated + (self._served.pauses[index] if index >= 0 else 0.0)

    def published(self, what: Published, *, paused: float = 0.0) -> None:
        """Note a publication, and how long its sync held the engines up."""
        self._served.since.append(what.generated)
        self._served.versions.append(what.version)
        self._served.pauses.append(paused + (self._served.pauses[-1] if self._served.pauses else 0.0))
        if self._began <= what.wall:
            self._publications += 1
            self._paused += paused

    def waiting(self, wall: float, *, groups: int, rollouts: int, tokens: float) -> None:
        """Note what has ended and is in no batch: complete groups, and rollouts with the tokens that were written in them."""
        if self._began <= wall:
            self._most_ready = max(self._most_ready, groups)
            self._most_waiting = max(self._most_waiting, tokens + rollouts * self._prompt_tokens)

    def formed(self, batch: Formed) -> None:
        """Note a batch."""
        self._done = batch.done
        if batch.k == self._first - 1:
            self._began = batch.done
        if batch.k < self._first:
            return
        self._batches += 1
        self._training += batch.seconds
        self._chunk.append(batch)
        self._in_chunk += batch.tokens.size
        if self._in_chunk >= _CHUNK:
            self._count()

    def lost(self, wall: float, row: str, tokens: float) -> None:
        """Note tokens that no batch will train on, by the row that they are in (`rules.waste.ROWS`)."""
        if self._began <= wall and tokens:
            self._lost[row] += round(tokens)

    def waited(self, since: float, until: float, cause: str) -> None:
        """Note why the trainer waited (wall clock)."""
        if (seconds := until - max(since, self._began)) > ROUNDING:
            self._waits[cause] += seconds

    def closed(self, since: float, until: float, reason: str) -> None:
        """Note why the gate was closed (wall clock)."""
        if (seconds := until - max(since, self._began)) > ROUNDING:
            self._closed[reason] += seconds

    def begins_with(self, k: int) -> bool:
        """Say whether the figures begin once batch k is trained."""
        return k == self._first - 1

    def marked(self, mark: Mark, *, begins: bool) -> None:
        """Note the sums at which the figures begin, or end."""
        if begins:
            self._started = mark
        else:
            self._ended = mark

    def in_flight(self, wall: float, rollouts: int) -> None:
        """Note how many rollouts are in flight."""
        if self._began <= wall:
            self._most_in_flight = max(self._most_in_flight, rollouts)

    def _count(self) -> None:
        """Count the tokens of the batches at hand by staleness."""
        if self._chunk:
            cells = cells_of(
                [batch.k for batch in self._chunk], [batch.starts for batch in self._chunk], [batch.tokens for batch in self._chunk]
            )
            self._counts.add(cells, self._served)
            self._chunk, self._in_chunk = [], 0

    def summary(self) -> Summary:
        """Return the figures."""
        self._count()
        seconds, counts = self._done - self._began, self._counts
        tokens = _by_value(counts.tokens)
        masked_tokens = {value: count for value, count in tokens.items() if self._masks and value > self._bound}
        trained_tokens = {value: count for value, count in tokens.items() if value not in masked_tokens}
        trained, masked = sum(trained_tokens.values()), sum(masked_tokens.values())
        busy = min(1.0, self._training / seconds)
        in_flight = (self._ended.generated + self._ended.held - self._started.generated - self._started.held) / seconds
        idle = self._ended.idle - self._started.idle
        return Summary(
            by="cohorts",
            batches=self._batches,
            seconds=seconds,
            batches_per_hour=3600 * self._batches / seconds,
            rollouts_per_hour=3600 * counts.rollouts / seconds,
            trained_tokens_per_second=trained / seconds,
            trainer_busy=busy,
            engines_busy=max(0.0, 1 - (self._paused + idle) / seconds),
            engines_paused=self._paused / seconds,
            trainer_waits={cause: time / seconds for cause, time in self._waits.items()},
            engines_wait={why: time / seconds for why, time in (("weight sync", self._paused), (_NOTHING, idle)) if time > ROUNDING},
            gate_closed={reason: time / seconds for reason, time in self._closed.items()},
            in_flight_mean=in_flight,
            in_flight_max=self._most_in_flight,
            ready_groups_max=self._most_ready,
            waiting_bytes_max=round(self._most_waiting * BYTES_PER_TOKEN),
            preemptions=0,
            tokens=Tokens(sampled=trained + masked + self._lost.total(), trained=trained, masked=masked, lost=dict(self._lost)),
            staleness=staleness_of(trained_tokens, masked_tokens, _by_value(counts.heads)),
            masked_share=masked / max(1, trained + masked),
            head_coverage=counts.covered / max(1, counts.rollouts),
            length_bias=self._length_bias(),
            latency_mean=counts.seconds / max(1, counts.rollouts),
            cycle_seconds=seconds / max(1, self._publications),
        )

    def _length_bias(self) -> LengthBias:
        """Return ten equal parts by length; a length that lies in two of them is split."""
        by_length = self._counts.by_length
        below = np.append(0.0, by_length[0].cumsum())
        edges = np.linspace(0, below[-1], 11)
        cumulated = [np.interp(edges, below, np.append(0.0, row.cumsum())) for row in by_length]
        count, tokens, trained, covered = (np.diff(row) for row in cumulated)
        return LengthBias(
            tokens=tuple((tokens / np.maximum(count, 1e-9)).tolist()),
            trained_share=tuple((trained / np.maximum(tokens, 1e-9)).tolist()),
            head_coverage=tuple((covered / np.maximum(count, 1e-9)).tolist()),
        )


def _by_value(counts: Ints) -> dict[int, int]:
    return {value: count for value, count in enumerate(counts.tolist()) if count}
