"""What is kept: whatever may still be trained, and no more than was asked for beyond that."""

from hypothesis import given
from hypothesis import strategies as st

from headway.events import Admitted, BatchAcknowledged, BatchFormed, Ingested, Ready, Resumed
from headway.rules.ledger import TRAINED_KEPT, Ledger, apply
from headway.rules.retention import needed_groups, remembered, removal_due, retired_below, short_of_space


def trained_ledger(batches, *, trained=None):
    """A ledger with one batch of one group per number, of which some are trained; group k is in batch k. One more group runs."""
    ledger = Ledger(version=0)
    for k in range(batches):
        for event in (Admitted(0.0, k, f"p{k}", 0, 1, 0), Ready(0.0, k, zero_advantage=False), BatchFormed(0.0, k, (k,), 0.0)):
            apply(ledger, event)
        if k < (batches if trained is None else trained):
            apply(ledger, BatchAcknowledged(0.0, k))
    apply(ledger, Admitted(0.0, batches, "running", 0, 1, 0))
    return ledger


@given(st.integers(0, 40), st.integers(0, 3), st.integers(1, 40))
def test_groups_in_flight_formed_and_of_the_last_trained_batches_are_needed(trained, ahead, keep):
    known = {}
    for batches in range(trained + ahead + 1):
        ledger = trained_ledger(batches, trained=min(batches, trained))
        known = remembered(known, ledger, keep)
    first = max(0, trained - keep)
    assert needed_groups(known, ledger, keep) == frozenset(range(first, trained + ahead + 1))
    assert sorted(known) == list(range(first, trained + ahead))


def test_groups_that_came_from_elsewhere_are_needed_like_live_ones():
    ledger = Ledger(version=0)
    for event in (
        Ingested(0.0, 0, "a", "replay", 1, 0),
        Ingested(0.0, 1, "b", "replay", 1, 1),
        Ready(0.0, 0, zero_advantage=False),
        BatchFormed(0.0, 0, (0,), 0.0),
    ):
        apply(ledger, event)
    assert needed_groups(remembered({}, ledger, 1), ledger, 1) == {0, 1}


def test_interrupted_groups_are_needed_until_it_is_known_what_becomes_of_them():
    ledger = trained_ledger(1)
    apply(ledger, Resumed(0.0, 1, 1, "line"))
    assert needed_groups(remembered({}, ledger, 1), ledger, 1) == {0, 1}


@given(st.integers(TRAINED_KEPT + 1, 40), st.integers(1, 30))
def test_a_process_that_does_not_know_a_batch_that_counts_prunes_nothing(keep, later):
    ledger = trained_ledger(100)
    known = remembered({}, ledger, keep)  # of the last batches only, as after a resume
    assert needed_groups(known, ledger, keep) is None
    for batches in range(101, 101 + later):
        ledger = trained_ledger(batches)
        known = remembered(known, ledger, keep)
    whole = later >= keep - TRAINED_KEPT
    assert needed_groups(known, ledger, keep) == (frozenset(range(100 + later - keep, 101 + later)) if whole else None)


def test_directories_of_the_last_batches_are_kept_or_all():
    assert [retired_below(trained, 3) for trained in (0, 3, 4, 10)] == [0, 0, 1, 7]
    assert retired_below(10, 0) == 0


def test_a_gate_that_was_closed_for_space_opens_with_some_to_spare():
    assert [short_of_space(free, 100, was) for free, was in ((99, False), (100, False), (109, True), (110, True))] == [
        True,
        False,
        True,
        False,
    ]
    assert [short_of_space(10**12 + spare * 2**20, 10**12, was_short=True) for spare in (63, 64)] == [True, False]
    assert not short_of_space(0, 0, was_short=False)


def test_a_look_for_what_may_go_is_due_with_each_batch_or_sixteen_times_in_as_many_as_are_kept():
    assert [removal_due(1, 0, keep) for keep in (1, 16, 31, 32)] == [True, True, True, False]
    assert [removal_due(trained, 100, 160) for trained in (100, 109, 110, 500)] == [False, False, True, True]
