"""The gate's arithmetic against the literal formulas of the design and of the mission document."""

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.rules.admission import GateLimits, capacity, capacity_by_staleness, capacity_reason, free_slots, intake
from headway.rules.ledger import Ledger
from headway.rules.view import Unit

FOREVER = 10**9
SMALL = st.integers(0, 12)


def limits(*, b=4, g=2, concurrent=1000, ahead=2.0, steps=FOREVER):
    return GateLimits(groups_per_batch=b, group_size=g, max_concurrent=concurrent, steps_ahead=ahead, steps=steps)


def ledger(*, version=0, k=0, running=0, ready=0, g=2, **more):
    units = {group: Unit(f"p{group}", 0, 0, g) for group in range(running + ready)}
    return Ledger(
        version=version,
        next_batch=k,
        running={group: units[group] for group in range(running)},
        ready={group: units[group] for group in range(running, running + ready)},
        rollouts_in_flight=running * g,
        next_group=running + ready,
        **more,
    )


def literal_intake(b, steps, k, version, ahead):
    """Sum over j = k..version + A of Bmin(j); of the last batch, a fraction, rounded down."""
    total, j = 0, k
    while j <= version + ahead:
        total += b if j < steps else 0
        j += 1
    last = version + math.floor(ahead) + 1
    share = ahead - math.floor(ahead)
    return total + (math.floor(share * b) if k <= last < steps else 0)


@given(st.integers(1, 40), st.integers(0, 30), SMALL, SMALL, st.integers(0, 60))
@example(10, 30, 0, 0, 23)  # 2.3 - 2 is .2999... in floating point
@example(1, 30, 5, 0, 30)  # a lag: nothing, not less
def test_intake_is_the_literal_sum_for_whole_and_fractional_steps_ahead(b, steps, k, version, tenths):
    ahead = Fraction(tenths, 10)
    assert intake(ledger(k=k, version=version), limits(b=b, ahead=float(ahead), steps=steps)) == literal_intake(b, steps, k, version, ahead)


@given(st.integers(1, 40), st.integers(0, 8), SMALL, SMALL, SMALL, st.integers(0, 30), st.integers(0, 400), st.integers(1, 8))
def test_with_whole_batches_and_a_equal_to_s_it_is_the_formula_of_the_mission_document(b, s, k, version, ready, running, concurrent, g):
    now = ledger(version=version, k=k, ready=ready, running=running, g=g)
    accepted = k * b + ready
    by_mission = min(concurrent // g - running, (s + version + 1) * b - (accepted + running))
    assert capacity(now, limits(b=b, g=g, concurrent=concurrent, ahead=float(s))) == max(0, by_mission)


@given(st.integers(1, 9), st.floats(0, 8), SMALL, SMALL, SMALL, SMALL, st.integers(0, 50), st.integers(1, 5), st.integers(0, 60))
def test_capacity_is_never_negative_and_never_more_than_either_bound(b, ahead, k, version, ready, running, concurrent, g, evals):
    bounds = limits(b=b, g=g, concurrent=concurrent, ahead=ahead)
    now = ledger(version=version, k=k, ready=ready, running=running, g=g)
    granted = capacity(now, bounds, evals)
    assert granted >= 0
    assert granted <= max(0, capacity_by_staleness(now, bounds))
    assert granted * g <= max(0, free_slots(now, bounds, evals))


@given(st.integers(1, 40), st.integers(0, 8), SMALL)
def test_empty_live_sets_give_full_capacity(b, s, k):
    assert capacity(ledger(version=k, k=k), limits(b=b, ahead=float(s), concurrent=FOREVER)) == (s + 1) * b


@given(st.integers(1, 9), st.integers(0, 8), SMALL)
def test_a_bound_of_zero_admits_one_batch_and_no_more_until_the_next_version(b, version, extra):
    bounds = limits(b=b, ahead=0.0, concurrent=FOREVER)
    assert capacity(ledger(version=version, k=version), bounds) == b
    assert capacity(ledger(version=version, k=version, ready=b), bounds) == 0
    assert capacity(ledger(version=version, k=version + 1 + extra), bounds) == 0


def test_no_group_is_admitted_for_a_batch_that_will_not_be():
    assert intake(ledger(k=4, version=4), limits(b=4, ahead=3.0, steps=6)) == 8
    assert intake(ledger(k=6, version=6), limits(b=4, ahead=3.5, steps=6)) == 0
    assert intake(ledger(k=5, version=5), limits(b=4, ahead=0.5, steps=6)) == 4


@given(st.floats(0, 8), st.integers(1, 40), SMALL)
def test_a_fraction_admits_between_its_floor_and_its_ceiling(ahead, b, version):
    granted = intake(ledger(k=version, version=version), limits(b=b, ahead=ahead))
    assert (math.floor(ahead) + 1) * b <= granted <= (math.ceil(ahead) + 1) * b


def test_the_slots_of_evaluation_count_against_training():
    bounds = limits(g=4, concurrent=12, ahead=8.0)
    assert [capacity(ledger(g=4), bounds, evals) for evals in (0, 1, 4, 5, 9, 12)] == [3, 2, 2, 1, 0, 0]


def test_members_that_have_ended_free_their_slots_before_their_group_is_ready():
    now = ledger(running=1, g=4)
    now.rollouts_in_flight = 1
    assert capacity(now, limits(g=4, concurrent=8, ahead=8.0)) == 1


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (ledger(), "open"),
        (ledger(draining="stop"), "draining"),
        (ledger(version=-1), "not published"),
        (ledger(exhausted=True), "end of data"),
        (ledger(exhausted=True, waiting={("p", 0): 1}), "open"),
        (ledger(ready=12), "staleness"),
        (ledger(running=5), "concurrency"),
    ],
)
def test_a_closed_gate_says_why(now, reason):
    bounds = limits(concurrent=11)
    assert capacity_reason(now, bounds) == reason
    if reason not in {"open", "end of data"}:
        assert capacity(now, bounds) == 0


@given(SMALL, SMALL, SMALL, SMALL, st.integers(0, 30), st.integers(0, 30))
def test_the_reason_is_open_exactly_when_a_group_may_start(version, k, running, ready, concurrent, evals):
    now, bounds = ledger(version=version, k=k, running=running, ready=ready), limits(concurrent=concurrent)
    assert (capacity_reason(now, bounds, evals) == "open") == (capacity(now, bounds, evals) > 0)


@pytest.mark.parametrize(
    ("ready", "more", "granted"),
    [
        (11, {}, 989),  # ship admits up to what engines take until (S + 1) B are ready
        (12, {}, 0),
        (3, {"max_ready_groups": 1}, 997),  # never before a batch is full: it could then never be formed
        (4, {"max_ready_groups": 1}, 0),
        (4, {"max_ready_groups": 5}, 996),
        (4, {"max_ready_bytes": 100}, 0),
        (4, {"max_ready_bytes": 101}, 996),
        (3, {"max_ready_bytes": 1}, 997),
    ],
)
def test_enforced_at_the_shipper_complete_groups_and_their_bytes_close_the_gate(ready, more, granted):
    bounds = GateLimits(
        groups_per_batch=4, group_size=1, max_concurrent=10**6, steps_ahead=0.0, steps=250, max_staleness=2, enforce="ship", **more
    )
    now = ledger(ready=ready, ready_size=100)
    assert capacity(now, bounds) == granted
    assert capacity_reason(now, bounds) == ("open" if granted else "ready groups")


def test_enforced_at_the_shipper_nothing_starts_for_batches_that_will_not_be():
    bounds = GateLimits(groups_per_batch=4, group_size=1, max_concurrent=10**6, steps_ahead=0.0, steps=3, max_staleness=3, enforce="ship")
    assert capacity(ledger(k=2), bounds) == 4
    assert capacity(ledger(k=3), bounds) == 0
    assert capacity(ledger(k=3, ready=1), bounds) == 0


@pytest.mark.parametrize(
    ("on_stale", "k", "reason"), [("mask", 2, "open"), ("mask", 3, "staleness"), ("drop", 3, "staleness"), ("train", 3, "open")]
)
def test_enforced_at_the_shipper_nothing_starts_that_is_too_old_at_its_birth(on_stale, k, reason):
    kinds = {"max_staleness": 2, "enforce": "ship", "on_stale": on_stale}
    bounds = GateLimits(groups_per_batch=4, group_size=1, max_concurrent=10**6, steps_ahead=0.0, steps=250, **kinds)
    now = ledger(version=0, k=k)
    assert capacity_reason(now, bounds) == reason
    assert (capacity(now, bounds) > 0) == (reason == "open")
