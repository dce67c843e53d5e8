"""Where a rule of the bound could be off by one and every other test would pass: each was broken on purpose once, and nothing failed."""

import pytest

from headway.rules.admission import GateLimits, intake
from headway.rules.batching import chosen, groups_to_take, in_the_way
from headway.rules.ledger import Ledger
from headway.rules.replay import place
from headway.rules.view import Promise, Unit

K, B, S = 5, 2, 2


def limits(**more):
    common = {"groups_per_batch": B, "group_size": 1, "max_concurrent": 100, "steps_ahead": 2.0, "steps": 10**9, "max_staleness": S}
    return GateLimits(**{**common, "on_stale": "wait", "replayed_groups": 1, **more})


def ledger(ready=(), running=(), **more):
    now = Ledger(version=K, next_batch=K, trained=K, **more)
    for births, units in ((ready, now.ready), (running, now.running)):
        for birth in births:
            units[now.next_group] = Unit("p", 0, birth, 1)
            now.births[birth] = now.births.get(birth, 0) + 1
            now.next_group += 1
    return now


def with_place_in_the_next_batch_but_one(now):
    now.ingested[100], now.promised[K + 1] = Promise(K + 1, ready=True), 1
    return now


def test_no_place_is_given_while_the_gate_is_closed():
    full = ledger(ready=[K] * 3 * B)
    assert place(full, limits(on_stale="train")) is None
    assert place(ledger(ready=[K] * (3 * B - 1)), limits(on_stale="train")) == K


def test_no_place_is_given_in_a_batch_that_will_not_be():
    assert place(ledger(promised={K: 1, K + 1: 1}), limits(steps=K + 2)) is None


def test_a_batch_waits_for_whoever_has_a_place_in_it_and_is_not_durable_yet():
    now = ledger(ready=[K, K], promised={K: 1}, awaited={K: 1})
    assert groups_to_take(now, limits()) == -1
    now.awaited.clear()
    assert groups_to_take(now, limits()) == 1


@pytest.mark.parametrize(("running", "n"), [([], 2), ([K], 3)], ids=["live ones are left", "live ones still run"])
def test_who_has_a_place_in_a_later_batch_comes_no_earlier_while_there_will_be_one(running, n):
    now = with_place_in_the_next_batch_but_one(ledger(ready=[K] * 3, running=running, exhausted=True))
    assert chosen(now, n) == [0, 1, 2][:n]


@pytest.mark.parametrize("age", [S, S + 1])
def test_enforced_at_the_shipper_a_group_is_in_the_way_from_one_version_over_the_bound(age):
    now = ledger(ready=[K, K], running=[K - age])
    assert in_the_way(now, limits(enforce="ship", on_stale="drop"), B) == ([2] if age > S else [])


def test_a_pace_chosen_under_a_larger_bound_is_cut_to_the_bound():
    assert intake(ledger(steps_ahead=9.0), limits()) == (S + 1) * B
