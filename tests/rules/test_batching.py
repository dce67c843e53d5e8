"""When a batch is formed and of what: exact sizes, oldest first, a tail at the end of the data and nothing while the run drains."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.rules.admission import GateLimits
from headway.rules.batching import doomed, groups_to_take, may_form, no_more_groups, nothing_left, oldest
from headway.rules.ledger import Ledger
from headway.rules.view import Promise, Unit

B = 4
LIMITS = GateLimits(groups_per_batch=B, group_size=2, max_concurrent=100, steps_ahead=2.0, steps=10)


def ledger(*, ready=0, running=0, k=0, **more):
    units = {group: Unit(f"p{group}", 0, 0, 2) for group in range(ready + running)}
    return Ledger(
        next_batch=k,
        ready={group: units[group] for group in range(ready)},
        running={group: units[group] for group in range(ready, ready + running)},
        **more,
    )


@given(st.integers(0, 20), st.integers(0, 3), st.integers(0, 12), st.booleans(), st.sampled_from(["", "stop"]), st.integers(0, 2))
def test_a_batch_takes_exactly_its_groups_or_the_rest_of_the_data_or_nothing(ready, running, k, exhausted, draining, waiting):
    taken = groups_to_take(
        ledger(
            ready=ready, running=running, k=k, exhausted=exhausted, draining=draining, waiting={(f"p{n}", 0): 1 for n in range(waiting)}
        ),
        LIMITS,
    )
    assert taken <= ready
    if draining or k >= LIMITS.steps:
        assert taken == -1
    elif ready >= B:
        assert taken == B
    else:
        assert taken == (ready if ready and exhausted and not waiting and not running else -1)


def test_the_tail_waits_for_groups_in_flight_and_for_prompts_that_will_be_tried_again():
    assert groups_to_take(ledger(ready=3, exhausted=True, running=1), LIMITS) == -1
    assert groups_to_take(ledger(ready=3, exhausted=True, waiting={("p", 0): 1}), LIMITS) == -1
    assert groups_to_take(ledger(ready=3, exhausted=True), LIMITS) == 3


def test_no_more_groups_come_once_nothing_runs_and_nothing_can_start():
    assert not no_more_groups(ledger())
    assert not no_more_groups(ledger(running=1, draining="stop"))
    assert no_more_groups(ledger(draining="stop", waiting={("p", 0): 1}))
    assert no_more_groups(ledger(ready=2, exhausted=True))


def test_nothing_is_left_once_no_group_is_in_line_or_to_come():
    assert nothing_left(ledger(exhausted=True))
    assert nothing_left(ledger(draining="stop", waiting={("p", 0): 1}))
    assert not nothing_left(ledger())
    assert not nothing_left(ledger(exhausted=True, waiting={("p", 0): 1}))
    assert not nothing_left(ledger(exhausted=True, running=1))
    assert not nothing_left(ledger(exhausted=True, ready=1))
    assert not nothing_left(ledger(exhausted=True, ingested={7: Promise(0)}))  # a place was given: who has it may still come


@pytest.mark.parametrize(
    ("k", "trained", "lead", "allowed"), [(0, 0, 0, True), (1, 0, 0, False), (1, 0, 1, True), (2, 0, 1, False), (7, 5, 2, True)]
)
def test_forming_leads_training_by_at_most_max_lead(k, trained, lead, allowed):
    assert may_form(Ledger(next_batch=k, trained=trained), lead) is allowed


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 6), max_size=30), st.integers(0, 35))
def test_the_oldest_births_go_first_and_ties_by_admission(births, n):
    ready = {group: Unit("p", 0, birth, 2) for group, birth in births.items()}
    assert oldest(ready, n) == sorted(births, key=lambda group: (births[group], group))[:n]


@given(st.integers(1, 16), st.data())
def test_a_group_is_doomed_iff_too_few_can_be_left_to_compare(members, data):
    lost = data.draw(st.integers(0, members))
    assert doomed(members, lost, whole_groups_only=False) == (lost > 0 and members - lost < min(2, members))
    assert doomed(members, lost, whole_groups_only=True) == (lost > 0)


def test_a_group_of_one_needs_its_one_and_a_group_of_two_needs_both():
    assert not doomed(1, 0, whole_groups_only=False)
    assert doomed(1, 1, whole_groups_only=False)
    assert doomed(2, 1, whole_groups_only=False)
    assert not doomed(3, 1, whole_groups_only=False)


def by_tokens(*tokens, **more):
    ready = {group: Unit("p", 0, 0, 2, tokens=count) for group, count in enumerate(tokens)}
    return Ledger(version=0, ready=ready, ready_tokens=sum(tokens), births={0: len(tokens)}, ready_births={0: len(tokens)}, **more)


def test_a_batch_sized_by_tokens_waits_for_its_budget_while_more_may_come_and_never_splits_a_group():
    budget = GateLimits(groups_per_batch=2, group_size=2, max_concurrent=100, steps_ahead=2.0, steps=10, batch_tokens=100)
    assert groups_to_take(by_tokens(40, 40), budget) == -1  # the gate is open: more may come
    assert groups_to_take(by_tokens(40, 40, exhausted=True), budget) == 2
    assert groups_to_take(by_tokens(40, 40, exhausted=True, running={9: Unit("p", 0, 0, 2)}), budget) == -1
    assert groups_to_take(by_tokens(*[10] * 6), budget) == 6  # nothing runs and nothing may start: what there is
    assert groups_to_take(by_tokens(40, 40, 20), budget) == 3
    assert groups_to_take(by_tokens(40, 40, 21), budget) == 2
    assert groups_to_take(by_tokens(60, 60, 60), budget) == 2  # Bmin comes before the budget
