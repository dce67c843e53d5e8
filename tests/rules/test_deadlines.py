"""The Hall test, and who stands in a batch's way: against counting by hand, and with an invariant that was broken before."""

from hypothesis import given
from hypothesis import strategies as st
from small_world import deadlines_hold, fewest_to_lose

from headway.rules.admission import GateLimits
from headway.rules.batching import in_the_way
from headway.rules.deadlines import holds, holds_after, last_tight, oldest_births, without
from headway.rules.ledger import Ledger
from headway.rules.view import Unit

K = 10
BIRTHS = st.lists(st.integers(4, K), max_size=12)
PROMISED = st.dictionaries(st.integers(K, K + 5), st.integers(1, 2), max_size=3)


def limits(bound, groups, steps=10**9, **more):
    return GateLimits(
        groups_per_batch=groups,
        group_size=1,
        max_concurrent=100,
        steps_ahead=float(bound),
        steps=steps,
        **({"max_staleness": bound, "on_stale": "drop"} | more),
    )


def ledger(ready, running, promised=None, **more):
    now = Ledger(version=K, next_batch=K, trained=K, promised=promised or {}, **more)
    for births, units in ((ready, now.ready), (running, now.running)):
        for birth in births:
            units[now.next_group] = Unit("p", 0, birth, 1, sampled_tokens=now.next_group % 3)
            now.births[birth] = now.births.get(birth, 0) + 1
            if units is now.ready:
                now.ready_births[birth] = now.ready_births.get(birth, 0) + 1
            now.next_group += 1
    return now


@st.composite
def kept(draw):
    """Return (bound, groups per batch, places, births) under which H(K) holds, often with nothing to spare: each group has its batch."""
    bound, groups = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    promised = {j: count for j in range(K, K + bound + 1) if (count := draw(st.sampled_from([0, 0, 0, 1])))}
    births = []
    for j in range(K, K + bound + 1):
        room = groups - promised.get(j, 0)
        for _ in range(draw(st.sampled_from([room, room, 0]))):
            births.append(min(K, draw(st.integers(j - bound, j - bound + 1))))
    return bound, groups, promised, draw(st.permutations(births))


def counted(births):
    return {birth: births.count(birth) for birth in births}


@given(BIRTHS, st.integers(0, 4), st.integers(2, 4), PROMISED, st.sampled_from([K + 2, 10**9]))
def test_the_test_is_the_invariant_as_it_is_written(births, bound, groups, promised, steps):
    def room(j):
        return (groups if j < steps else 0) - promised.get(j, 0)

    promised = {j: count for j, count in promised.items() if j < steps}
    assert holds(counted(births), K, limits(bound, groups, steps), promised) == deadlines_hold(births, K, bound, room)


@given(st.one_of(kept(), st.tuples(st.integers(0, 4), st.integers(2, 4), PROMISED, BIRTHS)), st.data())
def test_what_a_batch_leaves_behind_is_tested_without_taking_it(run, data):
    bound, groups, promised, births = run
    split = data.draw(st.integers(0, len(births)))
    n = data.draw(st.integers(0, groups))
    now = ledger(births[:split], births[split:], promised)
    left = without(now.births, oldest_births(now.ready_births, n))
    assert left == counted([*sorted(births[:split])[n:], *births[split:]])
    assert holds_after(now, limits(bound, groups), n) == holds(left, K + 1, limits(bound, groups), promised)


@given(kept())
def test_a_batch_can_spare_a_group_exactly_after_the_last_tight_deadline(run):
    bound, groups, promised, births = run
    now = ledger(births, [], promised)
    assert holds(now.births, K, limits(bound, groups), promised)
    tight = last_tight(now, limits(bound, groups))
    for j in range(K, K + bound + 2):
        lowered = promised | {j: promised.get(j, 0) + 1}
        assert holds(now.births, K, limits(bound, groups), lowered) == (j > tight)


@given(kept(), st.data())
def test_while_the_invariant_holds_only_running_groups_are_ever_in_the_way_and_the_fewest_go(run, data):
    bound, groups, promised, births = run
    split = data.draw(st.integers(0, len(births)))
    now = ledger(births[:split], births[split:], promised)
    n = groups - promised.get(K, 0)
    if len(now.ready) < n:
        return
    others = [*sorted(births[:split])[n:], *births[split:]]
    gone = in_the_way(now, limits(bound, groups), n)
    assert set(gone) <= set(now.running)
    assert len(gone) == max(0, fewest_to_lose(others, K + 1, bound, lambda j: groups - promised.get(j, 0)))


@given(BIRTHS, BIRTHS, st.integers(0, 4), st.integers(2, 4))
def test_even_with_a_broken_invariant_what_goes_is_the_least_that_mends_it(ready, running, bound, groups):
    """Nothing in a run breaks it; should it be broken all the same, running groups go first, and ready ones where these are not enough."""
    now, n = ledger(ready, running), min(groups, len(ready))
    gone = in_the_way(now, limits(bound, groups), n)
    assert len(set(gone)) == len(gone) == max(0, fewest_to_lose([*sorted(ready)[n:], *running], K + 1, bound, lambda _: groups))
    for group in gone:
        (now.ready if group in now.ready else now.running).pop(group)
    left = [unit.birth for unit in now.ready.values()]
    assert deadlines_hold([*sorted(left)[n:], *(unit.birth for unit in now.running.values())], K + 1, bound, lambda _: groups)


def test_of_those_in_the_way_the_ones_go_that_have_generated_least_and_then_the_newest():
    now = ledger([10, 10], [9, 9, 9, 10])
    for group, tokens in zip(now.running, (50, 5, 5, 0), strict=True):
        now.running[group].sampled_tokens = tokens
    assert in_the_way(now, limits(2, 2), 2) == [4]


def test_at_the_shipper_all_that_is_over_age_goes_before_a_batch_is_chosen():
    at_ship = limits(1, 2, enforce="ship")
    assert in_the_way(ledger([9, 10], [9]), at_ship, 2) == []
    assert in_the_way(ledger([8, 9, 7], [7, 9]), at_ship, 2) == [0, 2, 3]


def test_a_batch_takes_no_more_than_it_takes():
    assert not holds_after(ledger([9, 10], []), limits(0, 2), 1)
    assert holds_after(ledger([9, 10], []), limits(0, 2), 2)
