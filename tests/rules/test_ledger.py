"""What each event does to the ledger, and which histories contradict themselves."""

import pytest
from folded import fold
from ledger_events import admitted, dropped, finished, lost, ready

from headway.events import (
    Admitted,
    BatchAcknowledged,
    BatchFormed,
    ConfigChanged,
    Continued,
    Draining,
    Ended,
    EngineState,
    EvalFinished,
    EvalStarted,
    Finished,
    Ingested,
    PromptDropped,
    Published,
    Ready,
    Resumed,
    SourceExhausted,
)
from headway.rules.ledger import REWARDS_KEPT, Ledger, apply


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([admitted(3), admitted(3)], "admitted twice"),
        ([admitted(3), admitted(2)], "admitted twice"),
        ([finished(0)], "never admitted"),
        ([admitted(0), lost(1)], "never admitted"),
        ([ready(0)], "never admitted"),
        ([dropped(7)], "never admitted"),
        ([admitted(0, members=1), finished(0), finished(0)], "one more has ended"),
        ([BatchFormed(0.0, 1, (), 0.0)], "batch 0 is next"),
        ([admitted(0), BatchFormed(0.0, 0, (0,), 0.0)], "not ready"),
        ([admitted(0, members=1), finished(0), ready(0), BatchFormed(0.0, 0, (0, 0), 0.0)], "not ready"),
        ([BatchAcknowledged(0.0, 0)], "never formed"),
    ],
)
def test_a_history_that_contradicts_itself_is_refused(events, says):
    with pytest.raises(ValueError, match=says):
        fold(*events)


def test_an_attempt_that_is_retried_does_not_end_its_member():
    ledger = fold(admitted(0, members=2), lost(0, final=False), lost(0, final=False))
    assert ledger.rollouts_in_flight == 2
    assert ledger.lost == {"environment_error": 2}


def test_versions_never_go_back_and_may_jump():
    assert fold(Published(0.0, 3, ()), Published(0.0, 1, ())).version == 3
    assert fold(Published(0.0, 0, ()), Published(0.0, 9, ())).version == 9


def test_barren_counts_groups_in_a_row_that_could_not_train_and_one_that_can_ends_the_row():
    row = [admitted(0), dropped(0), admitted(1), ready(1, zero=True), admitted(2), dropped(2, "filtered")]
    assert fold(*row).barren == 3
    assert fold(*row, admitted(3), ready(3)).barren == 0


def test_a_group_that_the_run_cancels_is_not_barren():
    ledger = fold(*[admitted(group) for group in range(50)], *[dropped(group, "cancelled") for group in range(50)])
    assert ledger.barren == 0
    assert ledger.dropped == {"cancelled": 50}


def test_a_group_that_goes_stale_when_ready_has_been_counted_once():
    assert fold(admitted(0), ready(0, zero=True), dropped(0, "stale")).barren == 1


def test_a_requeued_prompt_waits_until_it_is_admitted_and_is_forgotten_once_trained():
    ledger = fold(admitted(0), dropped(0, "stale", requeued=True))
    assert (ledger.waiting_prompts, ledger.requeued) == (1, {("p", 0): 1})
    apply(ledger, admitted(1, "another"))
    assert ledger.waiting_prompts == 1
    apply(ledger, admitted(2))
    assert (ledger.waiting_prompts, ledger.requeued) == (0, {("p", 0): 1})
    for event in (dropped(2, "stale", requeued=True), admitted(3)):
        apply(ledger, event)
    assert ledger.requeued == {("p", 0): 2}
    for event in (ready(3), BatchFormed(0.0, 0, (3,), 0.0)):
        apply(ledger, event)
    assert ledger.requeued == {}


def test_the_same_prompt_in_another_epoch_is_another_prompt():
    ledger = fold(admitted(0, epoch=0), dropped(0, "stale", requeued=True), admitted(1, epoch=1))
    assert ledger.waiting_prompts == 1


def test_a_prompt_that_is_given_up_leaves_no_count_behind():
    ledger = fold(admitted(0), dropped(0, "stale", requeued=True), admitted(1), dropped(1, "stale"))
    assert (ledger.requeued, ledger.waiting_prompts) == ({}, 0)


def test_who_was_cancelled_or_interrupted_waits_and_has_used_up_no_try_of_those_that_are_counted():
    for cause in ("cancelled", "interrupted", "lineage"):
        ledger = fold(admitted(0), dropped(0, cause, requeued=True))
        assert (ledger.waiting, ledger.requeued) == ({("p", 0): 1}, {})


def test_failures_of_a_prompt_are_counted_in_a_row_across_epochs():
    failed = [event for group in range(3) for event in (admitted(group, epoch=group), dropped(group))]
    assert fold(*failed).failures == {"p": 3}
    assert fold(*failed, admitted(3, "another"), dropped(3)).failures == {"p": 3, "another": 1}
    assert fold(*failed, admitted(3), dropped(3, "stale")).failures == {"p": 3}
    assert fold(*failed, admitted(3), ready(3)).failures == {}


def test_a_prompt_in_quarantine_waits_in_no_epoch_and_comes_back_in_none():
    waiting = [event for epoch in range(2) for event in (admitted(epoch, epoch=epoch), dropped(epoch, "stale", requeued=True))]
    others = [admitted(2, "another"), dropped(2, "stale", requeued=True), admitted(3, epoch=2)]
    ledger = fold(*waiting, *others, PromptDropped(0.0, "p", 1, "quarantined", "poison", 3))
    assert (ledger.waiting, ledger.requeued) == ({("another", 0): 1}, {("another", 0): 1})
    apply(ledger, dropped(3, "stale", requeued=True))
    assert (list(ledger.waiting), ledger.quarantined) == ([("another", 0)], {"p": "poison"})


def test_one_that_is_missing_is_given_up_in_its_epoch_alone():
    waiting = [event for epoch in range(2) for event in (admitted(epoch, epoch=epoch), dropped(epoch, "stale", requeued=True))]
    ledger = fold(*waiting, PromptDropped(0.0, "p", 0, "missing", "gone"))
    assert (ledger.waiting, ledger.requeued, ledger.quarantined) == ({("p", 1): 1}, {("p", 1): 1}, {})


def test_payloads_of_groups_from_elsewhere_are_held_until_a_batch_takes_them_and_again_when_it_is_dissolved():
    theirs = Ingested(0.0, 0, "posted", "external", 1, 0)
    durable = [Finished(0.0, 0, 0, 0, 1.0, 5, 4, -1, -1, size=7), ready(0)]
    assert fold(theirs, *durable).held_size == 7
    assert fold(theirs, *durable, dropped(0, "score_error")).held_size == 0
    formed = fold(theirs, *durable, BatchFormed(0.0, 0, (0,), 0.0))
    assert (formed.held_size, formed.sampled_tokens) == (0, 0)
    apply(formed, Resumed(0.0, 0, 0, "line"))
    assert formed.held_size == 7


def test_what_was_interrupted_is_held_by_nobody_until_it_goes_on_and_its_latency_is_of_the_time_since():
    ledger = fold(Admitted(5.0, 0, "p", 0, 1, 0), Finished(6.0, 0, 0, 0, 1.0, 5, 4, 0, 0, size=7), Resumed(9000.0, 0, 0, "line"))
    assert ledger.held_size == 0
    for event in (Continued(9001.0, 0), Ready(9003.0, 0, zero_advantage=False)):
        apply(ledger, event)
    assert (ledger.held_size, ledger.latency_seconds) == (7, 2.0)


def test_live_groups_that_batches_have_taken_since_the_resume_are_counted():
    made = [event for group in range(3) for event in (admitted(group, f"p{group}"), ready(group))]
    ledger = fold(*made, Resumed(0.0, 0, 0, "line"), BatchFormed(0.0, 0, (0, 1), 0.0))
    assert ledger.resume_budget.taken == 2
    assert fold(*made, BatchFormed(0.0, 0, (0, 1), 0.0)).resume_budget is None


def test_rewards_of_the_latest_batches_are_kept_and_no_more():
    ledger = fold(*[BatchFormed(0.0, k, (), float(k)) for k in range(REWARDS_KEPT + 5)])
    assert len(ledger.rewards) == REWARDS_KEPT
    assert ledger.rewards[-1] == (REWARDS_KEPT + 4, float(REWARDS_KEPT + 4))


def test_an_evaluation_runs_from_its_start_to_its_end():
    ledger = fold(EvalStarted(0.0, 5, 10))
    assert (ledger.eval_running, ledger.last_eval) == (5, -1)
    apply(ledger, EvalFinished(0.0, 5, 9, 1, mixed=False))
    assert (ledger.eval_running, ledger.last_eval) == (None, 5)


def test_a_run_that_is_taken_up_again_starts_where_it_is_told_and_its_cut_evaluation_has_not_happened():
    ledger = fold(EvalStarted(0.0, 0, 10), Draining(0.0, "stop"), Resumed(0.0, 4, 5, "lineage"))
    assert (ledger.version, ledger.trained, ledger.next_batch, ledger.draining) == (4, 4, 5, "")
    assert (ledger.eval_running, ledger.last_eval, ledger.repeated_eval) == (None, -1, 0)
    apply(ledger, Resumed(0.0, 4, 5, "lineage"))
    assert ledger.repeated_eval == 0, "a second crash before the repetition forgets nothing"
    apply(ledger, EvalFinished(0.0, 4, 9, 1, mixed=False))
    assert ledger.repeated_eval is None


def test_flags_are_set_by_their_events():
    ledger = fold(SourceExhausted(0.0), Draining(0.0, "asked to"))
    assert (ledger.exhausted, ledger.draining) == (True, "asked to")


def test_facts_for_readers_change_nothing():
    assert fold(EngineState(0.0, "e", "serving", "x-0"), ConfigChanged(0.0, ("a",)), Ended(0.0, 0, "")) == Ledger()
