"""Head coverage in whole runs: what is always too late ends the run by name, what is late at times warns, and nothing else does."""

import logging

import pytest

from headway.errors import HeadNeverTrained
from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Fixed, Lognormal, mixture
from headway.sim.run import WorldSettings, simulate
from headway.sim.worker import RolloutSettings


def section(**more):
    """Enforced at the shipper: a gate at admission waits for the slow ones, and so covers some of them."""
    given = {"groups_per_batch": 8, "group_size": 2, "max_concurrent": 400, "max_staleness": 2, "steps_ahead": 2, "enforce": "ship"}
    return RolloutSection(**{**given, **more})


def world(seconds):
    """Rollouts of four turns, each with a reward of its own."""
    return WorldSettings(rollouts=RolloutSettings(seconds=seconds, turns=4, reward=lambda _prompt, _member, drawn: drawn))


SOME_HOPELESS = mixture((0.85, Fixed(0.5)), (0.15, Fixed(40.0)))


def test_a_tenth_that_is_never_covered_ends_the_run_and_names_what_to_turn():
    with pytest.raises(HeadNeverTrained, match=r"in 20 batches in a row .*the longest tenth.*rollout\.max_staleness \(it is 2\)"):
        simulate(world(SOME_HOPELESS), section(), RunSection(steps=200))


@pytest.mark.parametrize("more", [{"on_stale": "train"}, {"max_staleness": 100}], ids=["train", "a wide bound"])
def test_the_remedies_work(more):
    result = simulate(world(SOME_HOPELESS), section(**more), RunSection(steps=60))
    assert len(result.batches) == 60


def test_it_can_be_switched_off():
    assert len(simulate(world(SOME_HOPELESS), section(), RunSection(steps=60, max_uncovered_batches=0)).batches) == 60


def test_a_tail_that_is_late_at_times_is_warned_of_once_per_episode(caplog):
    with caplog.at_level(logging.WARNING, "headway"):
        result = simulate(world(Lognormal(1.0, 1.5)), section(enforce="admission"), RunSection(steps=100))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(result.batches) == 100
    assert 1 <= len(warnings) < 20
    assert all("the first token was trained on in only" in warning for warning in warnings)


def test_a_run_without_a_tail_says_nothing(caplog):
    with caplog.at_level(logging.INFO, "headway"):
        simulate(world(Fixed(1.0)), section(max_staleness=4), RunSection(steps=50))
    assert not caplog.records
