"""What becomes of the prompt of a group that lost too many members."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.rules.quarantine import INFRASTRUCTURE, PATIENCE, verdict
from headway.types import Cause

CAUSES = [cause for cause in get_args(Cause) if cause != "cancelled"]
LOST = st.lists(st.sampled_from(CAUSES), min_size=1, max_size=8)


def judged(*lost, failures=0, most=3, in_row=0):
    return verdict(failures=failures, failed_in_row=in_row, lost=lost, members=max(2, len(lost)), max_prompt_failures=most)


@pytest.mark.parametrize("cause", sorted(INFRASTRUCTURE))
def test_what_infrastructure_did_is_tried_again(cause):
    assert judged(cause).requeued
    assert judged("bad_reward", cause).requeued
    assert not judged(cause, "bad_reward").requeued, "the last loss is what counts"


@pytest.mark.parametrize("cause", ["bad_reward", "empty_completion", "length_mismatch", "over_length"])
def test_what_would_end_alike_is_not_tried_again_and_not_yet_quarantined(cause):
    assert (judged(cause).requeued, judged(cause).quarantined) == (False, "")


def test_the_failure_that_fills_the_measure_quarantines_the_prompt_and_says_after_how_many():
    assert [judged("timeout", failures=n).quarantined != "" for n in range(4)] == [False, False, True, True]
    assert judged("timeout", failures=2).quarantined == "3 groups of it in a row lost too many members, the last of 2 to timeout"
    assert judged("timeout", most=1).quarantined == "1 group of it lost too many members, the last of 2 to timeout"


def test_a_prompt_that_fits_no_context_is_quarantined_at_once_and_only_when_nothing_else_went_wrong():
    assert judged("prompt_too_long", "prompt_too_long").quarantined == "the prompt is too long for the engine's context"
    assert judged("timeout", "prompt_too_long").quarantined == ""


def test_while_nothing_works_a_prompt_is_not_blamed_for_a_service_that_is_down_and_not_spared_for_ever():
    assert [judged("timeout", failures=2, in_row=n).requeued for n in (0, 1, 2, 3, 100)] == [False, False, False, True, True]
    assert [judged("timeout", failures=n, in_row=100).quarantined != "" for n in (2, 10, 11)] == [False, False, True]
    assert judged("bad_reward", failures=2, in_row=100).quarantined, "that is no service"
    assert judged("prompt_too_long", in_row=100).quarantined


@given(LOST, st.integers(0, 25), st.integers(1, 5), st.integers(0, 50))
def test_a_prompt_is_tried_again_or_quarantined_or_neither_and_never_for_ever(lost, failures, most, in_row):
    found = judged(*lost, failures=failures, most=most, in_row=in_row)
    assert not (found.requeued and found.quarantined)
    assert found.cause == "incomplete"
    if failures + 1 >= most * PATIENCE or (failures + 1 >= most and in_row <= failures):
        assert found.quarantined


@given(LOST, st.integers(0, 8), st.integers(0, 5), st.integers(1, 5))
def test_what_the_run_itself_has_cancelled_is_no_failure_of_the_prompt(lost, at, failures, most):
    found = judged(*lost[:at], "cancelled", *lost[at:], failures=failures, most=most)
    assert (found.cause, found.requeued, found.quarantined) == ("cancelled", True, "")
