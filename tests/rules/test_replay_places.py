"""Places for replayed and external groups: never at the cost of a live group's deadline, and kept for somebody or not at all."""

import pytest

from headway.events import AnyEvent, BatchFormed, Finished, GroupDropped, Ingested, Ready, RolloutDropped
from headway.rules.admission import GateLimits, capacity
from headway.rules.ledger import Ledger, apply
from headway.rules.replay import place, reserved
from headway.rules.view import Unit


def limits(**more):
    common = {"groups_per_batch": 2, "group_size": 1, "max_concurrent": 100, "steps_ahead": 2.0, "steps": 10**9, "max_staleness": 2}
    return GateLimits(**{**common, "on_stale": "wait", "replayed_groups": 1, **more})


def ledger(*births, version=5, **more):
    now = Ledger(version=version, next_batch=version, trained=version, **more)
    for birth in births:
        now.ready[now.next_group] = Unit("p", 0, birth, 1)
        now.births[birth] = now.births.get(birth, 0) + 1
        now.ready_births[birth] = now.ready_births.get(birth, 0) + 1
        now.next_group += 1
    return now


@pytest.mark.parametrize(
    ("now", "within", "j"),
    [
        (ledger(), limits(), 5),
        (ledger(3, 3), limits(), 6),  # batch 5 is full of what is due by it
        (ledger(3, 3, 4, 4), limits(), 7),
        (ledger(3, 3, 4, 4, 5, 5), limits(), None),
        (ledger(3, 3), limits(on_stale="mask"), 6),
        (ledger(3, 3), limits(on_stale="train"), 5),
        (ledger(promised={5: 1}), limits(), 6),
        (ledger(promised={5: 1, 6: 1, 7: 1}), limits(), None),
        (ledger(), limits(replayed_groups=0), None),
        (ledger(draining="stop"), limits(), None),
        (ledger(version=-1), limits(), None),
        (ledger(), limits(steps=5), None),
        (ledger(), limits(enforce="ship", on_stale="mask", steps_ahead=0.0), 5),
    ],
)
def test_a_place_is_in_the_first_batch_that_can_spare_a_group(now, within, j):
    assert place(now, within) == j


def test_at_the_shipper_places_reach_as_far_as_the_bound_from_the_batch_that_is_next():
    now = ledger(version=1, promised={1: 1, 2: 1})
    now.version = 0
    within = limits(enforce="ship", on_stale="mask", steps_ahead=0.0)
    assert place(now, within) == 3
    now.promised[3] = 1
    assert place(now, within) is None


def test_capacity_is_kept_for_as_many_as_wait_and_may_have_a_place():
    assert reserved(ledger(), limits(), 0) == 0
    assert reserved(ledger(), limits(), 1) == 1
    assert reserved(ledger(promised={6: 1}), limits(), 9) == 2
    assert reserved(ledger(version=-1), limits(), 9) == 0


def test_nothing_is_kept_for_those_who_have_no_place_now():
    """Half a batch ahead: the gate is open by it alone, and there is no deadline that it could spare a group of."""
    now, within = ledger(4, 4), limits(steps_ahead=0.5, max_staleness=1)
    assert capacity(now, within) == 1
    assert place(now, within) is None
    assert reserved(now, within, 3) == 0


# ---- the fold of what holds a place ------------------------------------------------------------------------------------------------


def test_a_group_from_elsewhere_changes_no_live_set_and_no_statistics():
    now = Ledger(version=0)
    events: list[AnyEvent] = [
        Ingested(0.0, 0, "theirs", "external", 1, 0),
        Finished(0.0, 0, 0, 0, 1.0, 9, 8, 0, 0),
        Ready(0.0, 0, zero_advantage=True),
        Ready(0.0, 0, zero_advantage=True),
    ]
    for event in events:
        apply(now, event)
    assert (now.running, now.ready, now.births, now.sampled_tokens, now.barren) == ({}, {}, {}, 0, 0)
    assert (now.promised, now.awaited, now.latencies) == ({0: 1}, {}, 0)


def test_a_place_that_is_given_up_lowers_nothing_any_more():
    now = Ledger(version=0)
    for group, name in enumerate("ab"):
        apply(now, Ingested(0.0, group, name, "external", 1, 0))
    apply(now, Ready(0.0, 0, zero_advantage=False))
    apply(now, GroupDropped(0.0, 1, "incomplete", "", 0))
    assert (now.promised, now.awaited) == ({0: 1}, {})
    apply(now, GroupDropped(0.0, 0, "incomplete", "", 0))
    assert (now.promised, now.ingested, now.dropped) == ({}, {}, {"incomplete": 2})


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([Ingested(0.0, 0, "a", "replay", 1, 4)], "formed already"),
        ([Ingested(0.0, 0, "a", "replay", 1, 5), BatchFormed(0.0, 5, (), 0.0)], "without 1 of the groups that it was promised"),
        ([Ingested(0.0, 0, "a", "replay", 1, 5), BatchFormed(0.0, 5, (0,), 0.0)], "not ready"),
    ],
)
def test_a_history_in_which_a_place_is_not_kept_is_refused(events, says):
    now = Ledger(version=5, next_batch=5, trained=5)
    *before, last = events
    for event in before:
        apply(now, event)
    with pytest.raises(ValueError, match=says):
        apply(now, last)


def test_a_member_that_was_lost_after_it_had_finished_has_ended_once():
    now = Ledger(version=0, running={0: Unit("p", 0, 0, 2, ended=1)}, births={0: 1}, rollouts_in_flight=1, next_group=1)
    apply(now, RolloutDropped(0.0, 0, 0, 0, "bad_reward", "", 3, final=True, finished=True))
    assert now.rollouts_in_flight == 1
    apply(now, RolloutDropped(0.0, 0, 1, 0, "timeout", "", 3, final=True))
    assert now.rollouts_in_flight == 0


def test_once_the_last_batch_of_all_can_come_no_more_nothing_is_taken_in():
    assert place(ledger(exhausted=True), limits()) is None
    assert place(ledger(exhausted=True, waiting={("p", 0): 1}), limits()) == 5
    assert place(ledger(5, exhausted=True), limits()) is None  # the last batch is formed of what is there
    assert place(ledger(exhausted=True, running={0: Unit("p", 0, 5, 1)}), limits()) == 5
