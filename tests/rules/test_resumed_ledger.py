"""The ledger of a run that is taken up again: nothing in flight, dissolved batches ready again, nothing counted twice."""

import pytest
from folded import completed, fold

from headway.events import (
    Admitted,
    BatchAcknowledged,
    BatchFormed,
    Continued,
    Finished,
    GroupDropped,
    Ingested,
    PaceChanged,
    PromptDropped,
    Published,
    Ready,
    Resumed,
)
from headway.rules.admission import GateLimits, capacity
from headway.rules.ledger import TRAINED_KEPT, apply
from headway.rules.view import ResumeBudget

LIMITS = GateLimits(groups_per_batch=8, group_size=1, max_concurrent=10**6, steps_ahead=2.0, steps=10**9, max_staleness=2)


def test_a_resumed_run_has_nothing_in_flight_and_full_capacity_at_once():
    running = [Admitted(0.0, number, f"p{number}", 0, 3, 0) for number in range(4)]
    ledger = fold(Published(0.0, 0, ()), *running, PaceChanged(0.0, 1.5, 1.0, 1.0), Resumed(0.0, 0, 0, "ours"))
    assert (ledger.running, ledger.births, ledger.rollouts_in_flight, ledger.steps_ahead) == ({}, {}, 0, None)
    assert list(ledger.interrupted) == [0, 1, 2, 3]
    assert capacity(ledger, LIMITS) == 24
    for number in range(4):
        apply(ledger, GroupDropped(0.0, number, "interrupted", "in flight when the process ended", 0, requeued=True))
    assert (ledger.interrupted, ledger.waiting_prompts, ledger.dropped, ledger.barren) == ({}, 4, {"interrupted": 4}, 0)
    assert not ledger.requeued, "a crash is no fault of the prompts"


def test_a_process_that_dies_before_it_has_said_what_is_lost_leaves_it_remembered():
    ledger = fold(Admitted(0.0, 0, "p", 0, 1, 0), Resumed(0.0, 0, 0, "o"), Admitted(0.0, 1, "q", 0, 1, 0), Resumed(0.0, 0, 0, "o"))
    assert list(ledger.interrupted) == [0, 1]
    assert capacity(ledger, LIMITS) == 24


def test_a_dissolved_batch_is_ready_again_and_one_that_is_shipped_again_is_not():
    events = [event for number in range(4) for event in completed(number, 0)]
    formed = [BatchFormed(0.0, 0, (0, 1), 0.5), BatchFormed(0.0, 1, (2,), 0.6), BatchFormed(0.0, 2, (3,), 0.7)]
    ledger = fold(*events, *formed, Resumed(0.0, 0, 1, "ours"))
    assert (sorted(ledger.ready), ledger.births, ledger.ready_births) == ([2, 3], {0: 2}, {0: 2})
    assert (ledger.ready_tokens, ledger.ready_size, ledger.next_batch) == (10, 6, 1)
    assert [k for k, _ in ledger.rewards] == [0]


def test_places_come_back_with_a_dissolved_batch_where_they_were_held_and_undurable_ones_are_freed():
    places = [Ingested(0.0, 0, "a", "replay", 1, 0), Ingested(0.0, 1, "b", "replay", 1, 1), Ingested(0.0, 2, "c", "external", 1, 1)]
    durable = [Ready(0.0, 0, zero_advantage=False), Ready(0.0, 1, zero_advantage=False)]
    ledger = fold(*places, *durable, BatchFormed(0.0, 0, (0, 1), 0.0), Resumed(0.0, 0, 0, "ours"))
    assert {number: (held.k, held.ready) for number, held in ledger.ingested.items()} == {0: (0, True), 1: (1, True)}
    assert (ledger.promised, ledger.awaited) == ({0: 1, 1: 1}, {})


def test_a_place_in_a_batch_that_is_past_is_freed():
    ledger = fold(Ingested(0.0, 0, "a", "replay", 1, 0), Ready(0.0, 0, zero_advantage=False), Resumed(0.0, 3, 3, "ours"))
    assert (ledger.ingested, ledger.promised) == ({}, {})


def test_groups_of_long_trained_batches_are_forgotten():
    events = []
    for k in range(TRAINED_KEPT + 3):
        events += [*completed(k, 0), BatchFormed(0.0, k, (k,), 0.0), BatchAcknowledged(0.0, k)]
    assert list(fold(*events).formed) == list(range(3, TRAINED_KEPT + 3))


def test_one_answer_for_many_batches_forgets_them_together():
    events = [event for k in range(20) for event in (*completed(k, 0), BatchFormed(0.0, k, (k,), 0.0))]
    assert list(fold(*events, BatchAcknowledged(0.0, 19)).formed) == list(range(4, 20))


def test_rewards_of_batches_that_are_formed_anew_count_once():
    events = [event for k in range(3) for event in (*completed(k, 0), BatchFormed(0.0, k, (k,), 0.5))]
    assert [k for k, _ in fold(*events, Resumed(0.0, 0, 0, "ours")).rewards] == []
    assert [k for k, _ in fold(*events, Resumed(0.0, 0, 2, "ours")).rewards] == [0, 1]


def test_a_run_that_goes_on_far_ahead_forgets_all_that_it_remembered():
    ledger = fold(*completed(0, 0), BatchFormed(0.0, 0, (0,), 0.0), Resumed(0.0, 40, 40, "ours"), BatchAcknowledged(0.0, 39))
    assert ledger.formed == {}


def test_a_group_that_goes_on_counts_as_before_and_only_its_missing_members_are_in_flight():
    began = [Admitted(0.0, 0, "p", 0, 3, 0), Finished(0.0, 0, 1, 0, 1.0, 5, 4, 0, 0, size=3)]
    ledger = fold(Published(0.0, 0, ()), *began, Resumed(0.0, 0, 0, "ours"))
    assert (ledger.rollouts_in_flight, ledger.held_size, ledger.births) == (0, 0, {})
    apply(ledger, Continued(0.0, 0))
    assert (ledger.rollouts_in_flight, ledger.held_size, ledger.births, ledger.interrupted) == (2, 3, {0: 1}, {})
    assert capacity(ledger, LIMITS) == 23
    for member in (0, 2):
        apply(ledger, Finished(0.0, 0, member, 0, 1.0, 5, 4, 0, 0, size=3))
    apply(ledger, Ready(0.0, 0, zero_advantage=False))
    assert (sorted(ledger.ready), ledger.ready_tokens, ledger.held_size, ledger.rollouts_in_flight) == ([0], 15, 9, 0)


def test_only_what_was_interrupted_can_go_on():
    with pytest.raises(ValueError, match="was not interrupted"):
        fold(Admitted(0.0, 0, "p", 0, 1, 0), Continued(0.0, 0))


def test_a_prompt_that_came_back_keeps_count_of_its_tries_until_it_is_given_up():
    again = GroupDropped(0.0, 0, "interrupted", "", 0, requeued=True)
    ledger = fold(Admitted(0.0, 0, "p", 2, 1, 0), Resumed(0.0, 0, 0, "o"), again)
    assert ledger.waiting == {("p", 2): 1}
    apply(ledger, Admitted(0.0, 1, "p", 2, 1, 0))
    assert (ledger.waiting, ledger.running[1].tries) == ({}, 1)
    for event in (Resumed(0.0, 0, 0, "o"), GroupDropped(0.0, 1, "interrupted", "", 0, requeued=True)):
        apply(ledger, event)
    assert ledger.waiting == {("p", 2): 2}
    apply(ledger, PromptDropped(0.0, "p", 2, "missing", "the source no longer has it"))
    assert (ledger.waiting, ledger.quarantined) == ({}, {})


def test_what_may_start_before_the_first_new_version_is_counted_from_the_resume_on():
    ledger = fold(Admitted(0.0, 0, "p", 0, 1, 0), Resumed(0.0, 3, 3, "o"))
    for number in (1, 2):
        apply(ledger, Admitted(0.0, number, f"p{number}", 0, 1, 3))
    apply(ledger, GroupDropped(0.0, 0, "interrupted", "", 0, requeued=True))
    apply(ledger, GroupDropped(0.0, 2, "filtered", "", 0))
    assert ledger.resume_budget == ResumeBudget(3, 3, 1, admitted=1)
    apply(ledger, Published(0.0, 3, ()))
    assert ledger.resume_budget is not None, "serving the same version again opens nothing"
    apply(ledger, Published(0.0, 4, ()))
    assert ledger.resume_budget is None
