"""What a scenario that was played came to: `summarise` its figures, `timeline` who was at what, and why.

Everything is of the window (`sim.played`): batches after the warm-up, and the time in which they were trained. Tokens are those whose fate
was decided in that time, by the waste ledger (`rules.waste`); staleness is that of the batches' metrics, as `headway inspect` adds it up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headway.events import AnyEvent, Finished, GroupDropped, Published, RolloutDropped
from headway.rules.coverage import summed, tallies
from headway.rules.waste import ROWS, waste
from headway.sim.distributions import Floats
from headway.sim.garbage import collected_seldom
from headway.sim.intervals import engine_in_words, share_of, shares, trainer_in_words, within
from headway.sim.played import Played
from headway.sim.store import KeptBatch
from headway.sim.summary import Interval, LengthBias, Staleness, Summary, Tokens, staleness_of

UNDELIVERED = "undelivered"
_UNDECIDED = frozenset({"waiting", "in_flight"})
_TENTHS = 10


class _Ended(NamedTuple):
    """A finished rollout whose fate is decided."""

    sampled: int
    trained: int
    covered: bool


@collected_seldom()
def summarise(played: Played) -> Summary:
    """Return the figures of a scenario that was played."""
    result, start, end = played.result, played.start, played.end
    seconds = end - start
    batches = [result.batches[k] for k in range(played.warm_up, played.scenario.run.steps)]
    rows = [result.world.store.rows[batch.k] for batch in batches]  # of batches that trained while the orchestrator was down too
    tokens, staleness = _tokens(played), _staleness(batches)
    masked = sum(staleness.masked_histogram.values())
    trainer = list(within(trainer_in_words(played.trainer, played.gate), start, end))
    engines = [each for intervals in played.engines.values() for each in within(engine_in_words(intervals), start, end)]
    engine_seconds = seconds * len(played.engines)
    latencies = [event.seconds for event in result.events if isinstance(event, Finished) and start < event.time <= end]
    versions = sum(isinstance(event, Published) and start < event.time <= end for event in result.events)
    return Summary(
        by="virtual loop",
        batches=len(batches),
        seconds=seconds,
        batches_per_hour=3600 * len(batches) / seconds,
        rollouts_per_hour=3600 * sum(batch.rollouts for batch in batches) / seconds,
        trained_tokens_per_second=tokens.trained / seconds,
        trainer_busy=share_of("training", trainer, seconds),
        engines_busy=share_of("generating", engines, engine_seconds),
        engines_paused=share_of("paused", engines, engine_seconds),
        trainer_waits=shares(trainer, seconds, but="training"),
        engines_wait=shares(engines, engine_seconds, but="generating"),
        gate_closed=shares(within(played.gate, start, end), seconds, but="open"),
        in_flight_mean=played.in_flight_mean,
        in_flight_max=played.in_flight_max,
        ready_groups_max=played.ready_groups_max,
        waiting_bytes_max=played.waiting_bytes_max,
        preemptions=played.preemptions,
        tokens=tokens,
        staleness=staleness,
        masked_share=masked / max(1, masked + sum(staleness.histogram)),
        head_coverage=_head_coverage(rows),
        length_bias=_length_bias([*_in_batches(batches), *_dropped(result.events, start, end)]),
        latency_mean=math.fsum(latencies) / max(1, len(latencies)),
        cycle_seconds=seconds / max(1, versions),
    )


def timeline(played: Played) -> list[Interval]:
    """Return what trainer, engines and gate were at from the start of the run to the end of the window, causes in words, each in order."""
    engines = [each for intervals in played.engines.values() for each in engine_in_words(intervals)]
    return [*trainer_in_words(played.trainer, played.gate), *engines, *played.gate]


def _tokens(played: Played) -> Tokens:
    """Return where the tokens went whose fate was decided in the window: the books at its end less those at its start."""
    events = played.result.events
    fates = {k: row["token_fates"] for k, row in played.result.world.store.rows.items()}
    decided = Counter(_decided((event for event in events if event.time <= played.end), fates))
    if played.start > 0:
        decided.subtract(_decided((event for event in events if event.time <= played.start), fates))
    decided[UNDELIVERED] = sum(tokens for time, tokens in played.undelivered if played.start < time <= played.end)
    trained, masked = decided.pop("trained", 0), decided.pop("masked", 0)
    lost = {row: decided[row] for row in (*ROWS, UNDELIVERED) if decided[row]}
    return Tokens(sampled=trained + masked + sum(lost.values()), trained=trained, masked=masked, lost=lost)


def _decided(events: Iterable[AnyEvent], fates: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
    return {row: tokens for row, tokens in waste(events, fates).rows.items() if row not in _UNDECIDED}


def _staleness(batches: Sequence[KeptBatch]) -> Staleness:
    tokens, masked, heads = (Counter[int]() for _ in range(3))
    for batch in batches:
        tokens.update(batch.tokens)
        masked.update(batch.masked)
        heads.update(batch.heads)
    return staleness_of(tokens, masked, heads)


def _head_coverage(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the share of the rollouts in batches whose first token was trained on, as `headway inspect staleness` counts them."""
    whole = [tally for part, tally in summed(tallies(row) for row in rows).items() if part.tenth is None]
    return sum(tally.covered for tally in whole) / max(1.0, sum(tally.rollouts for tally in whole))


def _in_batches(batches: Iterable[KeptBatch]) -> Iterator[_Ended]:
    for batch in batches:
        for sampled, trained, covered in batch.shares:
            yield _Ended(sampled, trained, covered)


def _dropped(events: Iterable[AnyEvent], start: float, end: float) -> Iterator[_Ended]:
    """Yield the finished rollouts that were lost in the window, with their groups or alone: nothing of them was trained on."""
    live: dict[int, dict[int, int]] = {}
    for event in events:
        match event:
            case Finished():
                live.setdefault(event.group, {})[event.member] = event.sampled_tokens
            case GroupDropped():
                lost = live.pop(event.group, {})
                if start < event.time <= end:
                    yield from (_Ended(tokens, 0, covered=False) for tokens in lost.values())
            case RolloutDropped() if event.finished:
                tokens = live.get(event.group, {}).pop(event.member, 0)
                if tokens and start < event.time <= end:
                    yield _Ended(tokens, 0, covered=False)
            case _:
                pass


def _length_bias(ended: Sequence[_Ended]) -> LengthBias:
    """Return ten equal parts by sampled tokens. Rollouts of one length share their fate, so that it does not matter how they stand."""
    if not ended:
        nothing = (0.0,) * _TENTHS
        return LengthBias(tokens=nothing, trained_share=nothing, head_coverage=nothing)
    sampled, trained, covered = np.array(ended, np.float64).T
    lengths, alike, count = np.unique(sampled, return_inverse=True, return_counts=True)
    below = np.concatenate([[0.0], np.cumsum(count)])
    edges = np.linspace(0, len(ended), _TENTHS + 1)

    def tenths(of_a_length: Floats) -> Floats:
        return np.diff(np.interp(edges, below, np.concatenate([[0.0], np.cumsum(of_a_length)])))

    def share(of_a_length: Floats, whole: Floats) -> tuple[float, ...]:
        return tuple((tenths(of_a_length) / np.maximum(whole, 1e-9)).clip(max=1.0).tolist())

    tokens, size = tenths(lengths * count), np.full(_TENTHS, len(ended) / _TENTHS)
    return LengthBias(
        tokens=tuple((tokens / size).tolist()),
        trained_share=share(np.bincount(alike, trained).astype(np.float64), tokens),
        head_coverage=share(np.bincount(alike, covered).astype(np.float64), size),
    )
