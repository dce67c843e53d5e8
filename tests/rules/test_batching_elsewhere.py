"""Replayed and external groups in batches: in the one they were promised, and never left behind."""

from headway.events import AnyEvent, BatchFormed, Ingested, Published, Ready, SourceExhausted
from headway.rules.admission import GateLimits
from headway.rules.batching import can_form, chosen, groups_to_take
from headway.rules.ledger import Ledger, apply
from headway.rules.view import Unit

LIMITS = GateLimits(groups_per_batch=4, group_size=2, max_concurrent=100, steps_ahead=2.0, steps=10, replayed_groups=1)


def test_groups_from_elsewhere_are_not_left_behind_when_no_live_ones_come_any_more():
    ledger = Ledger()
    events: list[AnyEvent] = [
        Published(0.0, 0, ("e",)),
        Ingested(0.0, 0, "old", "replay", 1, 0),
        Ingested(0.0, 1, "older", "replay", 1, 2),
        Ready(0.0, 0, zero_advantage=False),
        SourceExhausted(0.0),
    ]
    for event in events:
        apply(ledger, event)
    assert not can_form(ledger, LIMITS)  # group 1 is not durable yet
    apply(ledger, Ready(0.0, 1, zero_advantage=False))
    assert can_form(ledger, LIMITS)
    assert chosen(ledger, groups_to_take(ledger, LIMITS)) == [0, 1]
    apply(ledger, BatchFormed(0.0, 0, (0, 1), 0.0))
    assert (ledger.ingested, ledger.promised) == ({}, {})


def test_the_last_full_batch_does_not_wait_for_a_place_in_a_later_one_that_is_not_durable_yet():
    ledger = Ledger(version=0, exhausted=True, ready={group: Unit("p", 0, 0, 2) for group in range(4)}, next_group=4)
    apply(ledger, Ingested(0.0, 4, "late", "external", 1, 1))
    assert chosen(ledger, groups_to_take(ledger, LIMITS)) == [0, 1, 2, 3]
    apply(ledger, Ready(0.0, 4, zero_advantage=False))
    assert chosen(ledger, groups_to_take(ledger, LIMITS)) == [4, 0, 1, 2, 3]
