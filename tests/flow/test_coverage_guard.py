"""The coverage guard: one warning per episode, an end for what can never be learned, advice now and then."""

import logging

import pytest
from doubles import Spine

from headway.errors import HeadNeverTrained
from headway.flow.coverage_guard import CoverageGuard
from headway.settings import RolloutSection


def row(share=1.0, longest=1.0, *, masked=0, environment="maths"):
    return {
        "rollouts_by_environment": {environment: 100},
        "head_coverage_by_environment": {environment: share},
        "head_coverage_by_length": {environment: [1.0] * 9 + [longest]},
        "token_fates": {"trained": 100 - masked, "masked": masked},
    }


def guard_of(spine, *, max_uncovered_batches=0):
    rollout = RolloutSection(max_staleness=4)
    return CoverageGuard(watch=spine.watch, rollout=rollout, max_uncovered_batches=max_uncovered_batches)


async def test_a_warning_per_episode_with_figures_and_the_remedy(caplog):
    guard = guard_of(Spine())
    with caplog.at_level(logging.WARNING, "headway"):
        for _ in range(15):
            guard.heed(row(0.4, 0.0))
    [warning] = [record.getMessage() for record in caplog.records]
    assert 'environment "maths"' in warning
    assert "40% of its rollouts and 0% of the longest tenth" in warning
    assert "raise rollout.max_staleness (it is 4) or rollout.groups_per_batch" in warning
    caplog.clear()
    with caplog.at_level(logging.WARNING, "headway"):
        for _ in range(10):
            guard.heed(row())
        assert not caplog.records
        for _ in range(10):
            guard.heed(row(1.0, 0.2))
    [warning] = [record.getMessage() for record in caplog.records]
    assert "of the longest tenth" in warning
    assert "of its rollouts" not in warning


@pytest.mark.parametrize(("rows", "where"), [([row(0.9, 0.0)] * 3, "the longest tenth"), ([row(0.0)] * 3, 'environment "maths" had')])
async def test_what_is_never_covered_ends_the_run_and_names_the_remedy(rows, where):
    guard = guard_of(Spine(), max_uncovered_batches=3)
    guard.heed(rows[0])
    guard.heed(row())
    for each in rows[:-1]:
        guard.heed(each)
    with pytest.raises(HeadNeverTrained, match=f"3 batches in a row .run.max_uncovered_batches. no rollout of .*{where}.*max_staleness"):
        guard.heed(rows[-1])


async def test_an_environment_that_is_low_is_told_with_its_worst_tenth_and_not_tenth_by_tenth(caplog):
    guard = guard_of(Spine())
    poor = row(0.3) | {"head_coverage_by_length": {"maths": [0.3] * 8 + [0.1, 0.45]}}
    with caplog.at_level(logging.WARNING, "headway"):
        guard.heed(poor)
        guard.heed(row(0.1) | {"head_coverage_by_length": {"maths": [0.1] * 10}})
    [warning] = [record.getMessage() for record in caplog.records]
    assert "only 30% of its rollouts and 10% of tenth 9 by length:" in warning


async def test_once_an_environment_is_low_what_becomes_low_of_it_later_is_no_news_and_another_environment_is(caplog):
    guard = guard_of(Spine())
    with caplog.at_level(logging.WARNING, "headway"):
        guard.heed(row(0.5))
        for _ in range(5):
            guard.heed(row(0.5, 0.0))
        [warning] = caplog.messages
        assert "only 50% of its rollouts:" in warning
        guard.heed(row(0.5, environment="code"))
    assert [message.split(",")[0] for message in caplog.messages[1:]] == ['environment "code"']


async def test_batches_that_nothing_live_was_in_are_no_reason_for_advice(caplog):
    """As where all of a batch was replayed: there is nothing to take a share of."""
    nothing = {"rollouts_by_environment": {}, "head_coverage_by_environment": {}, "head_coverage_by_length": {}}
    guard = guard_of(Spine())
    with caplog.at_level(logging.INFO, "headway"):
        for _ in range(20):
            guard.heed(nothing | {"token_fates": {"trained": 0, "masked": 0}})
    assert caplog.messages == []


async def test_on_policy_gets_no_advice_to_be_otherwise(caplog):
    spine = Spine()
    guard = CoverageGuard(watch=spine.watch, rollout=RolloutSection(max_staleness=0), max_uncovered_batches=0)
    with caplog.at_level(logging.INFO, "headway"):
        for _ in range(50):
            guard.heed(row(0.9, 0.9, masked=5))
    assert not caplog.records


async def test_zero_never_ends_a_run():
    guard = guard_of(Spine())
    for _ in range(200):
        guard.heed(row(0.0, 0.0))


async def test_advice_comes_rarely_and_with_figures(caplog):
    guard = guard_of(Spine())
    with caplog.at_level(logging.INFO, "headway"):
        for _ in range(100):
            guard.heed(row(0.9, 0.9, masked=5))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines if "masked" in line] == [f"advice after {n} batches" for n in (20, 40, 80)]
    assert "5.0%" in lines[0]
    assert any("90.0%" in line for line in lines)
