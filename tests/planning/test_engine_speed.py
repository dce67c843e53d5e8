"""How fast engines write is told from when rollouts started and ended: on histories of engines that are exactly as the model says."""

from heapq import heappop, heappush

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.planning.engine_speed import speed_of
from headway.planning.observed import Attempted, Observed, Synced


def history(tokens, arrivals, *, tokens_per_second, half_speed_at, tool_seconds=0.0, engines=1):
    """Return what is observed of rollouts that arrive at engines in turn, which they share evenly; each first waits for its tool."""
    tools = np.broadcast_to(tool_seconds, len(tokens))
    ends = np.zeros(len(tokens))
    for engine in range(engines):
        mine = np.arange(engine, len(tokens), engines)
        starts = arrivals[mine] + tools[mine]
        now = work = 0.0
        heap = []
        for rollout in [*mine[np.argsort(starts)], -1]:
            until = np.inf if rollout < 0 else arrivals[rollout] + tools[rollout]
            while heap:
                speed = tokens_per_second / (1 + (len(heap) / half_speed_at if half_speed_at else 0))
                if (done := now + (heap[0][0] - work) / speed) > until:
                    work += (until - now) * speed
                    break
                now, work = done, heap[0][0]
                ends[heappop(heap)[1]] = done
            now = until
            if rollout >= 0:
                heappush(heap, (work + tokens[rollout], rollout))
    edges = sorted([*((time, 1) for time in arrivals), *((time, -1) for time in ends)])
    times, changes = np.array(edges).T
    rollouts = [
        Attempted(number, start, end, int(count), int(count), 1)
        for number, (start, end, count) in enumerate(zip(arrivals, ends, tokens, strict=True))
    ]
    return Observed(0.0, float(ends.max()), np.array([-np.inf, *times]), np.array([0.0, *np.cumsum(changes)]), rollouts)


def in_bursts(rng, count, size, apart):
    return np.sort(np.repeat(np.arange(count // size) * apart, size) + rng.uniform(0, 0.05 * apart, count))


def found(observed, **kept):
    return speed_of(observed, **{"engines": 1, "max_sequences": 0, "pauses": True, **kept})


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    half_speed_at=st.sampled_from([4.0, 16.0, 64.0]),
    tokens_per_second=st.sampled_from([20.0, 100.0]),
    engines=st.sampled_from([1, 3]),
)
def test_the_fall_with_load_and_the_speed_alone_are_told(seed, half_speed_at, tokens_per_second, engines):
    rng = np.random.default_rng(seed)
    tokens = np.maximum(1, rng.lognormal(4, 0.8, 1200).round())
    arrivals = in_bursts(rng, 1200, 60, apart=120 * tokens.mean() / tokens_per_second / engines)
    observed = history(tokens, arrivals, tokens_per_second=tokens_per_second, half_speed_at=half_speed_at, engines=engines)
    speed = found(observed, engines=engines)
    loads = np.array([1.0, 10.0, 60.0]) / engines
    told = speed.tokens_per_second / (1 + loads / speed.half_speed_at)
    true = tokens_per_second / (1 + loads / half_speed_at)
    assert told == pytest.approx(true, rel=0.1 if engines == 1 else 0.35)
    assert not len(speed.environment) or speed.environment.sum() < 0.2 * sum(one.end - one.start for one in observed.rollouts)


def test_engines_that_are_never_slower_are_told_so():
    rng = np.random.default_rng(1)
    tokens = rng.integers(20, 400, 1000)
    speed = found(history(tokens, in_bursts(rng, 1000, 50, apart=5.0), tokens_per_second=50.0, half_speed_at=0.0))
    assert speed.half_speed_at == 0
    assert speed.tokens_per_second == pytest.approx(50.0, rel=0.01)
    assert not len(speed.environment)


@pytest.mark.parametrize("tool", ["lognormal", "pareto"])
def test_the_environments_time_is_told_from_the_engines(tool):
    rng = np.random.default_rng(2)
    tokens = np.maximum(1, rng.lognormal(5, 0.7, 4000).round())
    tools = rng.lognormal(0.2, 0.5, 4000) if tool == "lognormal" else 0.5 * (1 + rng.pareto(2.2, 4000))
    arrivals = in_bursts(rng, 4000, 50, apart=8.0)
    speed = found(history(tokens, arrivals, tokens_per_second=100.0, half_speed_at=0.0, tool_seconds=tools))
    assert speed.tokens_per_second == pytest.approx(100.0, rel=0.1)
    assert speed.environment.mean() == pytest.approx(tools.mean(), rel=0.15)
    assert np.quantile(speed.environment, [0.5, 0.95]) == pytest.approx(np.quantile(tools, [0.5, 0.95]), rel=0.25)


def test_a_pause_for_weights_is_no_slowness():
    rng = np.random.default_rng(3)
    tokens = rng.integers(50, 500, 600)
    observed = history(tokens, in_bursts(rng, 600, 20, apart=6.0), tokens_per_second=100.0, half_speed_at=0.0)
    pauses = np.arange(10.0, observed.until, 20.0)

    def stretched(time):
        return time + 3.0 * np.searchsorted(pauses, time)

    held = Observed(
        observed.since,
        stretched(observed.until),
        np.array([stretched(time) for time in observed.times]),
        observed.in_flight,
        [Attempted(one.group, stretched(one.start), stretched(one.end), *one[3:]) for one in observed.rollouts],
        syncs=[Synced(pause + 3.0 * (number + 1), 1, 3.0) for number, pause in enumerate(pauses)],
    )
    speed = found(held)
    assert (speed.tokens_per_second, len(speed.environment)) == (pytest.approx(100.0, rel=0.02), 0)
    assert len(found(held, pauses=False).environment)  # where engines go on meanwhile, rollouts that take longer wait for something else


def test_what_all_rollouts_of_a_length_cannot_tell_is_said():
    rng = np.random.default_rng(4)
    observed = history(np.full(500, 100), in_bursts(rng, 500, 25, apart=5.0), tokens_per_second=50.0, half_speed_at=10.0)
    speed = found(observed)
    assert not speed.told_apart
    lives = np.array([one.end - one.start for one in observed.rollouts])
    assert 100 / speed.tokens_per_second <= lives.max()
