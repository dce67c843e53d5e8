"""The vector counts of the stepper are those of a walk from token to token."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sim.cohort_counts import Served, TokenCounts, cells_of
from headway.sim.cohort_draws import Lengths
from headway.sim.cohort_units import Units
from headway.sim.distributions import Fixed, Uniform

SPEED = 4.0  # tokens a second: a token is written every 0.25 s, and all times here are multiples of 1/8


def walked(k, starts, tokens, served, bound):
    """Count the rollouts of batch k token by token."""
    by_staleness, heads, covered, trained, seconds = Counter(), Counter(), 0, [], 0.0
    for start, length in zip(starts, tokens, strict=True):
        written_by = [max(i for i, since in enumerate(served.since) if since <= start + token / SPEED) for token in range(length)]
        staleness = [k - served.versions[i] for i in written_by]
        by_staleness.update(staleness)
        kept = [value for value in staleness if bound is None or value <= bound]
        heads.update(kept[:1])
        covered += bound is None or staleness[0] <= bound
        trained.append(len(kept))
        seconds += length / SPEED + served.pauses[written_by[-1]] - served.pauses[written_by[0]]
    return by_staleness, heads, covered, trained, seconds


def told(counts):
    return {value: count for value, count in enumerate(counts.tolist()) if count}


@given(
    gaps=st.lists(st.integers(0, 12), max_size=6),
    jumps=st.lists(st.integers(1, 2), min_size=6, max_size=6),
    units=st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(1, 40), min_size=2, max_size=2)), min_size=4, max_size=12),
    bound=st.sampled_from([None, 0, 1, 2, 5]),
    batches=st.integers(1, 3),
    few=st.sampled_from([0, 3, 256]),
)
def test_tokens_heads_and_cover_are_what_a_walk_from_token_to_token_finds(gaps, jumps, units, bound, batches, few):
    since = [0.0, *np.cumsum([gap / 8 for gap in gaps]).tolist()]
    versions = np.cumsum([0, *jumps[: len(gaps)]]).tolist()
    served = Served(since, versions, [0.5 * number for number in range(len(since))])
    units = sorted(units[: len(units) // batches * batches])
    size = len(units) // batches
    ks = [versions[-1] + 1 + batch for batch in range(batches)]
    parts = [units[batch * size : (batch + 1) * size] for batch in range(batches)]
    counts = TokenCounts(SPEED, bound, few=few)
    counts.add(
        cells_of(
            ks,
            [np.array([start / 8 for start, _ in part]) for part in parts],
            [np.array([lengths for _, lengths in part], float) for part in parts],
        ),
        served,
    )
    by_staleness, heads, covered, trained, seconds, lengths = Counter(), Counter(), 0, [], 0.0, []
    for k, part in zip(ks, parts, strict=True):
        starts = [start / 8 for start, tokens in part for _ in tokens]
        tokens = [length for _, tokens in part for length in tokens]
        found = walked(k, starts, tokens, served, bound)
        by_staleness += found[0]
        heads += found[1]
        covered += found[2]
        trained += found[3]
        seconds += found[4]
        lengths += tokens
    assert told(counts.tokens) == by_staleness
    assert told(counts.heads) == heads
    assert (counts.rollouts, counts.covered) == (len(lengths), covered)
    assert counts.seconds == pytest.approx(seconds)
    rollouts, tokens, kept, whole = counts.by_length
    assert told(rollouts) == Counter(lengths)
    assert tokens.sum() == sum(lengths)
    assert kept.sum() == sum(trained)
    assert whole.sum() == covered
    assert {length: kept[length] for length in set(lengths)} == {
        length: sum(part for part, whose in zip(trained, lengths, strict=True) if whose == length) for length in set(lengths)
    }


def test_counts_go_on_where_they_were_and_very_long_rollouts_lie_in_bins():
    served = Served([0.0, 10.0], [0, 1], [0.0, 0.25])
    counts = TokenCounts(SPEED, None)
    for k in (1, 2):
        counts.add(cells_of([k], [np.array([0.0, 0.0])], [np.array([[30.0], [2e6]])]), served)
    assert told(counts.tokens) == {0: 2e6 - 40, 1: (30 + 40) + (2e6 - 40), 2: 30 + 40}
    assert counts.seconds == pytest.approx(2 * (30 + 2e6) / SPEED + 2 * 0.25)
    rollouts, tokens, _, _ = counts.by_length
    assert rollouts.sum() == 4
    assert tokens.sum() == 2 * (30 + 2e6)
    assert (rollouts[30], rollouts[1 << 16 :].sum()) == (2, 2)


def test_a_table_that_would_be_too_large_is_made_in_parts():
    """200 rollouts that meet 2,000 versions each, as one version after the other says."""
    rng = np.random.default_rng(1)
    since = np.cumsum(rng.integers(1, 4, 3000)) / 8
    served = Served(since.tolist(), list(range(3000)), np.linspace(0, 9, 3000).tolist())
    starts, tokens = np.sort(rng.choice(since[:900], 200)), rng.integers(1900, 2100, (200, 1)).astype(float)
    told_of = []
    for few in (0, 256):
        counts = TokenCounts(SPEED, 2500, few=few)
        counts.add(cells_of([3000], [starts], [tokens]), served)
        told_of.append((told(counts.tokens), told(counts.heads), counts.covered, pytest.approx(counts.seconds)))
    assert told_of[0] == told_of[1]
    assert sum(told_of[0][0].values()) == tokens.sum()


@given(members=st.integers(1, 3), takes=st.lists(st.integers(1, 40_000), min_size=1, max_size=5))
def test_units_to_come_are_whole_numbers_of_tokens_each_handed_out_once(members, takes):
    lengths = Lengths(Uniform(0.2, 9.0), members, SPEED, np.random.default_rng(3))
    parts = [lengths.take(count) for count in takes]
    for count, (tokens, seconds) in zip(takes, parts, strict=True):
        assert tokens.shape == (count, members)
        assert (tokens == np.rint(tokens)).all()
        assert tokens.min() >= 1
        assert np.allclose(seconds, tokens.max(axis=1) / SPEED)
    again = Lengths(Uniform(0.2, 9.0), members, SPEED, np.random.default_rng(3)).take(takes[0])
    assert (again[0] == parts[0][0]).all()


@given(
    starts=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    seed=st.integers(0, 5),
    members=st.integers(1, 3),
    now=st.integers(0, 60),
    since=st.integers(0, 40),
)
def test_what_is_told_of_units_at_an_instant_is_what_their_members_say(starts, seed, members, now, since):
    now, since = now / 8 + 1 / 16, since / 8 + 1 / 16  # between two tokens
    tokens = np.random.default_rng(seed).integers(1, 20, (len(starts), members)).astype(float)
    units = Units(members, SPEED)
    begun = np.sort(np.array(starts) / 8)
    last = units.add(begun, tokens, tokens.max(axis=1) / SPEED)
    ends = begun[:, np.newaxis] + tokens / SPEED
    assert last == ends.max()
    ended = [unit for unit in range(len(starts)) if ends[unit].max() <= now]
    assert units.ended(now).tolist() == ended
    assert units.started(now) == sum(start <= now for start in begun)
    assert sorted(units.in_flight(now)) == sorted(ends[(begun[:, np.newaxis] <= now) & (ends > now)])
    assert units.older_than(since, units.ended(now)).tolist() == [unit for unit in ended if (ends[unit] - 1 / SPEED < since).all()]
    assert units.ends_of(1) == ends.max(axis=1).min()
    assert units.ends_of(len(starts) + 1) == np.inf
    for count in range(1, len(starts) + 1):
        assert units.ends_of(count, count) == ends[:count].max()
    every = np.arange(len(starts))
    written = [
        [sum(start + token / SPEED < now for token in range(1, int(n) + 1)) for n in row] for start, row in zip(begun, tokens, strict=True)
    ]
    assert units.written(now, every).tolist() == [sum(row) for row in written]
    assert units.finished(now, every) == tokens[ends <= now].sum()


def test_lengths_of_one_value_are_that_value():
    assert Lengths(Fixed(7.2), 2, SPEED, np.random.default_rng(0)).take(3)[0].tolist() == [[7.0, 7.0]] * 3
