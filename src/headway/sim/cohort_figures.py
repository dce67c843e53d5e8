"""What the cohort stepper counts, and the figures that it makes of it: token by token, a few hundred thousand rollouts at once.

Token i of a rollout that starts at s and takes n / speed seconds is written at s + i / speed on the generation clock, by the version that
was served then (as `sim.engine` stamps it). So the versions of a batch are told from starts and lengths alone, after the fact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.sim.distributions import Floats
from headway.sim.scenario import Scenario, drawn, warm_up_of
from headway.sim.summary import BYTES_PER_TOKEN, LengthBias, Summary, Tokens, staleness_of

_CHUNK = 1 << 18  # rollouts counted at once
_BINS = 100  # of a decade of lengths
_DECADES = 9
_ROUNDING = 1e-9
_NOTHING = "the gate is closed by staleness"
Ints = NDArray[np.int64]


class Published(NamedTuple):
    """A version is served: since when, on the generation clock and on the wall's."""

    generated: float
    wall: float
    version: int


class Formed(NamedTuple):
    """Batch k, formed at `at` and trained at `done` after `seconds` (wall clock); `tokens`: a row per member, a column per unit."""

    k: int
    at: float
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
        self._speed = scenario.fleet.tokens_per_second
        self._bound = scenario.rollout.max_staleness
        self._masks = masks
        self._prompt_tokens = drawn(scenario.workload.prompt_tokens).mean
        self._first = warm_up_of(scenario)
        self._began = 0.0 if self._first == 0 else np.inf  # when the batch before the first was trained
        self._done = 0.0
        self._served_since: list[float] = []  # on the generation clock
        self._versions: list[int] = []
        self._publications = 0
        self._chunk: list[Formed] = []
        self._in_chunk = 0
        self._batches = self._rollouts = 0
        self._trained: Ints = np.zeros(1, np.int64)  # tokens by staleness
        self._masked: Ints = np.zeros(1, np.int64)
        self._heads: Ints = np.zeros(1, np.int64)
        self._covered = 0
        self._training = self._paused = self._latency = 0.0
        self._started, self._ended = Mark(), Mark()
        self._pauses: list[float] = []  # of the syncs up to each publication, in all
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._lost: Counter[str] = Counter()
        self._by_length = np.zeros((4, _BINS * _DECADES))  # rollouts, tokens, trained tokens, covered rollouts
        self._most_in_flight = self._most_ready = 0
        self._most_waiting = 0.0
        self._closed: defaultdict[str, float] = defaultdict(float)

    def served_since(self, version: int) -> float:
        """Return since when nothing older than a version is served, on the generation clock; infinite: it is not served yet."""
        if version <= 0:
            return -np.inf
        index = bisect_left(self._versions, version)
        return self._served_since[index] if index < len(self._versions) else np.inf

    def published(self, what: Published, *, paused: float = 0.0) -> None:
        """Note a publication, and how long its sync held the engines up."""
        self._served_since.append(what.generated)
        self._versions.append(what.version)
        self._pauses.append(paused + (self._pauses[-1] if self._pauses else 0.0))
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
        if (seconds := until - max(since, self._began)) > _ROUNDING:
            self._waits[cause] += seconds

    def closed(self, since: float, until: float, reason: str) -> None:
        """Note why the gate was closed (wall clock)."""
        if (seconds := until - max(since, self._began)) > _ROUNDING:
            self._closed[reason] += seconds

    def trained(self, k: int, mark: Mark) -> bool:
        """Note that batch k is trained; whether the figures begin here."""
        self._ended = mark
        if k == self._first - 1:
            self._started = mark
        return k == self._first - 1

    def in_flight(self, wall: float, rollouts: int) -> None:
        """Note how many rollouts are in flight."""
        if self._began <= wall:
            self._most_in_flight = max(self._most_in_flight, rollouts)

    def _count(self) -> None:
        """Count the tokens of the batches at hand by staleness."""
        if not self._chunk:
            return
        since, versions = np.array(self._served_since), np.array(self._versions)
        members, size = self._chunk[0].tokens.shape
        k = np.tile(np.repeat([batch.k for batch in self._chunk], size), members)
        starts = np.tile(np.concatenate([batch.starts for batch in self._chunk]), members)
        tokens = np.concatenate([batch.tokens for batch in self._chunk], axis=1).ravel()
        self._chunk, self._in_chunk = [], 0
        born = np.searchsorted(since, starts + _ROUNDING, side="right") - 1
        trained, head, ended = self._by_staleness(k, starts, tokens, born, since, versions)
        first = k - versions[born]
        covered = first <= self._bound if self._masks else np.ones(len(k), np.bool_)
        self._covered += int(covered.sum())
        self._heads = _added(self._heads, np.bincount(head[head >= 0]))
        self._rollouts += len(k)
        pauses = np.array(self._pauses)
        self._latency += float(tokens.sum()) / self._speed + float((pauses[ended] - pauses[born]).sum())
        which = np.minimum((np.log10(tokens) * _BINS).astype(np.int64), _BINS * _DECADES - 1)
        for row, weights in enumerate((np.ones(len(k)), tokens, trained, covered)):
            self._by_length[row] += np.bincount(which, weights=weights, minlength=_BINS * _DECADES)

    def _by_staleness(
        self, k: Ints, starts: Floats, tokens: Floats, born: Ints, since: Floats, versions: Ints
    ) -> tuple[Floats, Ints, Ints]:
        """Count all tokens by staleness.

        `born`: the publication that each rollout was born under. Returns of each how many tokens are trained on, the staleness of the
        oldest of these (-1: none is), and the publication under which it ended.
        """
        at, written, trained, head = born.copy(), np.zeros(len(k)), np.zeros(len(k)), np.full(len(k), -1)
        left = np.arange(len(k))
        ends = np.append(since[1:], np.inf)
        while len(left):
            until = np.ceil(np.minimum((ends[at[left]] - starts[left]) * self._speed - _ROUNDING, tokens[left]))
            count = np.maximum(until - written[left], 0.0)
            staleness = k[left] - versions[at[left]]
            trains = (staleness <= self._bound) if self._masks else np.ones(len(left), np.bool_)
            self._trained = _added(self._trained, np.bincount(staleness[trains], weights=count[trains]))
            self._masked = _added(self._masked, np.bincount(staleness[~trains], weights=count[~trains]))
            trained[left] += count * trains
            oldest = trains & (count > 0) & (head[left] < 0)
            head[left[oldest]] = staleness[oldest]
            written[left] = np.maximum(written[left], until)
            left = left[until < tokens[left]]
            at[left] += 1
        return trained, head, at

    def summary(self) -> Summary:
        """Return the figures."""
        self._count()
        seconds = self._done - self._began
        trained, masked = int(self._trained.sum()), int(self._masked.sum())
        busy = min(1.0, self._training / seconds)
        in_flight = (self._ended.generated + self._ended.held - self._started.generated - self._started.held) / seconds
        idle = self._ended.idle - self._started.idle
        return Summary(
            by="cohorts",
            batches=self._batches,
            seconds=seconds,
            batches_per_hour=3600 * self._batches / seconds,
            rollouts_per_hour=3600 * self._rollouts / seconds,
            trained_tokens_per_second=trained / seconds,
            trainer_busy=busy,
            engines_busy=max(0.0, 1 - (self._paused + idle) / seconds),
            engines_paused=self._paused / seconds,
            trainer_waits={cause: time / seconds for cause, time in self._waits.items()},
            engines_wait={why: time / seconds for why, time in (("weight sync", self._paused), (_NOTHING, idle)) if time > _ROUNDING},
            gate_closed={reason: time / seconds for reason, time in self._closed.items()},
            in_flight_mean=in_flight,
            in_flight_max=self._most_in_flight,
            ready_groups_max=self._most_ready,
            waiting_bytes_max=round(self._most_waiting * BYTES_PER_TOKEN),
            preemptions=0,
            tokens=Tokens(sampled=trained + masked + self._lost.total(), trained=trained, masked=masked, lost=dict(self._lost)),
            staleness=staleness_of(_by_value(self._trained), _by_value(self._masked), _by_value(self._heads)),
            masked_share=masked / max(1, trained + masked),
            head_coverage=self._covered / max(1, self._rollouts),
            length_bias=self._length_bias(),
            latency_mean=self._latency / max(1, self._rollouts),
            cycle_seconds=seconds / max(1, self._publications),
        )

    def _length_bias(self) -> LengthBias:
        """Return ten equal parts by length; a bin that lies in two of them is split."""
        rollouts = self._by_length[0]
        below = np.concatenate([[0.0], np.cumsum(rollouts)])
        edges = np.linspace(0, below[-1], 11)
        cumulated = [np.interp(edges, below, np.concatenate([[0.0], np.cumsum(row)])) for row in self._by_length]
        count, tokens, trained, covered = (np.diff(row) for row in cumulated)
        return LengthBias(
            tokens=tuple((tokens / np.maximum(count, 1e-9)).tolist()),
            trained_share=tuple((trained / np.maximum(tokens, 1e-9)).tolist()),
            head_coverage=tuple((covered / np.maximum(count, 1e-9)).tolist()),
        )


def _added(counts: Ints, more: NDArray[np.float64] | Ints) -> Ints:
    total = np.zeros(max(len(counts), len(more)), np.int64)
    total[: len(counts)] += counts
    total[: len(more)] += np.rint(more).astype(np.int64)
    return total


def _by_value(counts: Ints) -> dict[int, int]:
    return {value: count for value, count in enumerate(counts.tolist()) if count}
