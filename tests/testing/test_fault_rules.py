"""Rules: which matches fire, and that a rule that can never fire is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.testing.rules import Firing, first_firing


@given(st.integers(1, 50), st.integers(1, 7))
def test_every_nth_fires_at_multiples(count, every):
    assert Firing(every=every).fires(count) == (count % every == 0)


@given(st.integers(1, 60), st.integers(0, 6), st.integers(0, 10), st.integers(1, 4))
def test_times_bounds_how_often_a_rule_fires(count, every, after, times):
    rule = Firing(every=every, after=after, times=times)
    fired = sum(rule.fires(each) for each in range(1, count + 1))
    possible = max(0, count - after) // max(1, every)
    assert fired == min(times, possible)


def test_nth_names_matches_by_number():
    assert [count for count in range(1, 6) if Firing(nth=(1, 4)).fires(count)] == [1, 4]


def test_a_value_matches_by_equality_choice_or_pattern():
    facts = {"path": "/pause", "member": 2, "purpose": None}
    assert Firing(match={"path": "/pa*", "member": [1, 2]}).matches(facts)
    assert not Firing(match={"member": 3}).matches(facts)
    assert Firing(match={"purpose": None}).matches(facts)


def test_a_rule_on_a_fact_that_nobody_has_is_refused():
    with pytest.raises(ValueError, match="grp"):
        Firing(match={"grp": 1}).matches({"group": 1})


def test_the_first_rule_that_fires_decides_and_those_below_have_seen_nothing():
    rules = [Firing(nth=(2,)), Firing()]
    counts = [0, 0]

    def count(index):
        counts[index] += 1
        return counts[index]

    fired = [first_firing(rules, {}, count) for _ in range(3)]
    assert fired == [rules[1], rules[0], rules[1]]
    assert counts == [3, 2]
