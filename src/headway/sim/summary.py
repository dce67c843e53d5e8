"""What a simulated run came to: the figures that `headway simulate`, `plan` and `sweep` print, save and compare.

Whoever simulates (the virtual loop, the cohort stepper) fills in the same struct. Shares are of 1, times in virtual seconds, staleness in
versions. Figures are of the batches after the warm-up, and of the time in which those were trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from headway.settings.section import Section

BYTES_PER_TOKEN = 12  # of a rollout's payload


class Tokens(Section, frozen=True, kw_only=True):
    """What became of the tokens that engines wrote: `trained` + `masked` + sum of `lost` = `sampled`.

    What still waits or runs at the end is in none of them. `lost`: by row of `rules.waste.ROWS` ("stale", "zero_advantage", "failed", ...);
    what engines wrote and nobody received is "undelivered".
    """

    sampled: int
    trained: int
    masked: int
    lost: Mapping[str, int]


class Staleness(Section, frozen=True, kw_only=True):
    """Staleness of trained tokens; `histogram[s]` and `masked_histogram[s]` count tokens.

    `head_*`: over rollouts, of their oldest trained token.
    """

    mean: float
    p99: int
    max: int
    histogram: tuple[int, ...]
    masked_histogram: Mapping[int, int]
    head_mean: float
    head_p99: int
    head_max: int


class LengthBias(Section, frozen=True, kw_only=True):
    """Ten equal parts of the finished rollouts by sampled tokens, shortest first.

    Of each: mean tokens of a rollout, share of its tokens that were trained on, head coverage.
    """

    tokens: tuple[float, ...]
    trained_share: tuple[float, ...]
    head_coverage: tuple[float, ...]


class Summary(Section, frozen=True, kw_only=True):
    """How a simulated run went.

    `by`: "virtual loop" or "cohorts". `trainer_busy`: share of the time in which it trained. `engines_busy`: share of engine time in which
    anything was decoded or prefilled; `engines_paused`: in which a sync held them up. `trainer_waits` / `engines_wait`: share of the time
    by cause, in words that people read (they sum to 1 - busy). `gate_closed`: share of the time by `rules.admission.CapacityReason`.
    `in_flight_mean`: rollouts. `waiting_bytes_max`: payload bytes that finished rollouts held at most (12 bytes a token).
    `latency_mean`: seconds that an attempt took which finished. `cycle_seconds`: between versions that were served.
    """

    by: str
    batches: int
    seconds: float
    batches_per_hour: float
    rollouts_per_hour: float
    trained_tokens_per_second: float
    trainer_busy: float
    engines_busy: float
    engines_paused: float
    trainer_waits: Mapping[str, float]
    engines_wait: Mapping[str, float]
    gate_closed: Mapping[str, float]
    in_flight_mean: float
    in_flight_max: int
    ready_groups_max: int
    waiting_bytes_max: int
    preemptions: int
    tokens: Tokens
    staleness: Staleness
    masked_share: float
    head_coverage: float
    length_bias: LengthBias
    latency_mean: float
    cycle_seconds: float


class Interval(msgspec.Struct, frozen=True):
    """A stretch of the timeline: `who` ("trainer", "engine-0", "gate") was in `state` for `why` from `start` to `end`, virtual seconds.

    States of the trainer: training, waiting. Of an engine: generating, idle, paused, lost. Of the gate: open, closed.
    """

    who: str
    start: float
    end: float
    state: str
    why: str = ""


def staleness_of(tokens: Mapping[int, int], masked: Mapping[int, int], heads: Mapping[int, int]) -> Staleness:
    """Return the figures of counts by staleness: of trained and of masked tokens, and of rollouts by their oldest trained token."""
    stalest = max(tokens, default=-1)
    return Staleness(
        mean=_mean(tokens),
        p99=percentile(tokens, 0.99),
        max=max(0, stalest),
        histogram=tuple(tokens.get(staleness, 0) for staleness in range(stalest + 1)),
        masked_histogram=dict(sorted(masked.items())),
        head_mean=_mean(heads),
        head_p99=percentile(heads, 0.99),
        head_max=max(heads, default=0),
    )


def percentile(counts: Mapping[int, int], share: float) -> int:
    """Return the smallest value that so large a share of the counts is at or below (nearest rank); 0: nothing was counted."""
    rank, below = math.ceil(share * sum(counts.values())), 0
    for value in sorted(counts):
        below += counts[value]
        if below >= rank:
            return value
    return 0


def _mean(counts: Mapping[int, int]) -> float:
    return sum(value * count for value, count in counts.items()) / max(1, sum(counts.values()))
