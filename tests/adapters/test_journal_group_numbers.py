"""The groups of a segment: a set, in a small part of a set's memory."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from headway.adapters.journal.group_numbers import GroupNumbers

NUMBERS = st.frozensets(st.integers(0, 5000) | st.integers(0, 2**63))


@given(NUMBERS, NUMBERS)
def test_it_answers_as_a_set_does(some, others):
    numbers = GroupNumbers(some)
    assert numbers.isdisjoint(GroupNumbers(others)) == some.isdisjoint(others)
    assert numbers.newest == max(some, default=-1)


@given(NUMBERS, st.integers(0, 5000))
def test_a_number_added_is_in_it_and_no_other(some, number):
    numbers = GroupNumbers(some)
    numbers.add(number)
    assert not numbers.isdisjoint(GroupNumbers([number]))
    assert numbers.isdisjoint(GroupNumbers([number + 1])) == (number + 1 not in some)


def test_a_hundred_thousand_groups_take_less_than_a_byte_each():
    tracemalloc.start()
    try:
        numbers = GroupNumbers(range(7, 100_007))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert numbers.newest == 100_006
    assert held < 100_000
