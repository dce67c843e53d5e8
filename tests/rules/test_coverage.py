"""Head coverage as an alarm, part by part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.rules.coverage import FEWEST_ROLLOUTS, Part, Tally, low, summed, tallies, uncovered_in_a_row

MATHS, LONG = Part("maths"), Part("maths", 9)


def row(rollouts, share, by_length):
    return {
        "rollouts_by_environment": {"maths": rollouts},
        "head_coverage_by_environment": {"maths": share},
        "head_coverage_by_length": {"maths": by_length},
    }


def test_a_row_is_told_part_by_part_and_an_empty_tenth_is_none():
    found = tallies(row(40, 0.75, [1.0] * 8 + [None, 0.0]))
    assert found[MATHS] == (30.0, 40)
    assert found[LONG] == (0.0, 4.0)
    assert Part("maths", 8) not in found


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1))
def test_shares_over_a_window_weigh_by_rollouts(batches):
    rows = [row(n, min(covered, n) / n, [None] * 10) for n, covered in batches]
    total = summed(map(tallies, rows))[MATHS]
    assert total.rollouts == sum(n for n, _ in batches)
    assert total.share == pytest.approx(sum(min(covered, n) for n, covered in batches) / total.rollouts)


@pytest.mark.parametrize(
    ("covered", "rollouts", "before", "is_low"),
    [
        (74, 100, False, True),
        (75, 100, False, False),
        (79, 100, True, True),  # one episode until it has recovered
        (80, 100, True, False),
        (0, FEWEST_ROLLOUTS - 1, False, False),  # too few to say
        (FEWEST_ROLLOUTS - 1, FEWEST_ROLLOUTS - 1, True, True),
    ],
)
def test_what_is_low(covered, rollouts, before, is_low):
    assert low({MATHS: Tally(covered, rollouts)}, {MATHS} if before else set()) == ({MATHS} if is_low else set())


def test_a_part_that_does_not_occur_stays_what_it_was():
    assert low({}, {LONG}) == {LONG}
    assert uncovered_in_a_row({LONG: 3}, {MATHS: Tally(0, 5)}) == {LONG: 3, MATHS: 1}


def test_one_covered_rollout_begins_the_count_anew():
    counts = {}
    for covered in (0.0, 0.0, 1.0, 0.0):
        counts = uncovered_in_a_row(counts, {MATHS: Tally(covered, 8)})
    assert counts == {MATHS: 1}
