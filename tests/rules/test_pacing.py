"""Pace: half a batch at a time, never above the bound; advice only where the figures call for it, with the figures and the key."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.rules.pacing import BATCHES_BETWEEN_CHANGES, advice, change_due, next_steps_ahead, steps_needed

SECONDS = st.floats(0.001, 10**5)
HALVES = st.integers(0, 40).map(lambda halves: halves / 2)


@given(HALVES, st.one_of(st.just(0.0), SECONDS), st.one_of(st.just(0.0), SECONDS), st.integers(0, 20))
def test_a_change_is_half_a_batch_at_most_and_never_above_the_bound(current, latency, cycle, bound):
    changed = next_steps_ahead(current, latency, cycle, bound)
    assert 0 <= changed <= bound
    if current <= bound:
        assert abs(changed - current) <= 0.5


@given(HALVES, SECONDS, SECONDS, st.integers(0, 20))
def test_repeated_it_arrives_at_what_is_needed_rounded_up_to_halves(current, latency, cycle, bound):
    for _ in range(100):
        current = next_steps_ahead(current, latency, cycle, bound)
    assert current == min(bound, math.ceil(2 * (latency / cycle + 1)) / 2)
    assert current >= min(bound, steps_needed(latency, cycle))


def test_nothing_changes_before_both_have_been_measured():
    assert next_steps_ahead(2.0, 0.0, 5.0, 8) == 2.0
    assert next_steps_ahead(2.0, 5.0, 0.0, 8) == 2.0


def test_it_follows_the_figures_of_the_design():
    assert next_steps_ahead(2.0, 10.0, 10.0, 8) == 2.0
    assert next_steps_ahead(2.0, 11.0, 10.0, 8) == 2.5
    assert next_steps_ahead(2.5, 1.0, 10.0, 8) == 2.0
    assert next_steps_ahead(1.0, 100.0, 10.0, 1) == 1.0
    assert next_steps_ahead(2.3, 20.0, 10.0, 8) == 2.8


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_changes_are_batches_apart(k, changed_at):
    assert change_due(k, changed_at) == (k >= changed_at + BATCHES_BETWEEN_CHANGES)


def told(**values):
    return advice(**{"on_stale": "mask", "max_staleness": 8, "latency_seconds": 10.0, "cycle_seconds": 10.0, **values})


def test_a_run_that_is_well_set_gets_no_advice():
    assert told(masked_share=0.02, head_coverage=0.95) == []
    assert told(max_staleness=2) == []
    assert told(latency_seconds=0.0, max_staleness=0) == []
    assert told(cycle_seconds=0.0, max_staleness=0, on_stale="wait", timeout_seconds=99.0) == []


@pytest.mark.parametrize(("on_stale", "cost"), [("mask", "masked"), ("wait", "may wait"), ("drop", "dropped")])
def test_a_bound_below_what_keeps_the_trainer_busy_is_named_with_its_price(on_stale, cost):
    (line,) = told(on_stale=on_stale, max_staleness=2, latency_seconds=25.0)
    for part in ("rollout.max_staleness is 2", "25 s", "10 s", "3.50", cost, "raise rollout.max_staleness to 4"):
        assert part in line


def test_who_trains_on_everything_has_no_bound_to_raise():
    assert told(on_stale="train", max_staleness=0) == []


def test_masked_tokens_and_lost_heads_are_told_with_their_shares():
    masked, heads = told(masked_share=0.0312, head_coverage=0.871)
    assert "3.1% of the sampled tokens are masked" in masked
    assert "87.1% of the rollouts" in heads
    assert all("rollout.max_staleness" in line for line in (masked, heads))


def test_waiting_is_bounded_by_the_timeout_and_a_long_one_is_named():
    (line,) = told(on_stale="wait", timeout_seconds=100.0)
    for part in ("rollout.timeout_seconds is 100", "8 x 10 s = 80 s", "20 s", "lower rollout.timeout_seconds"):
        assert part in line
    assert told(on_stale="wait", timeout_seconds=80.0) == []
    assert told(on_stale="mask", timeout_seconds=100.0) == []
    assert not any("timeout" in line for line in told(on_stale="wait", max_staleness=0, timeout_seconds=100.0))  # it always waits
