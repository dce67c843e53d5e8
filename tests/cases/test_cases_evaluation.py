"""Fault cases of evaluation and of what is reported (J, K), as whole runs on virtual time and as rows of real batches."""

from collections import Counter
from itertools import pairwise
from typing import get_args

import pytest
from bound_world import bounded, bounded_world, play

from headway.events import BatchAcknowledged, Draining, EvalFinished, EvalStarted, Published
from headway.settings import EvalSection, MetricsSection, RunSection
from headway.sim.distributions import Fixed
from headway.sim.engine import EngineSettings
from headway.sim.run import simulate
from headway.sim.trainer import TrainerSettings
from headway.sim.worker import Fault
from headway.types import Cause

SECTION = bounded("mask", 2, groups_per_batch=4, group_size=4)


def of(kind, result):
    return [event for event in result.events if isinstance(event, kind)]


def whole(every, *, prompts, n=1, steps=12, world=None, section=SECTION, hold=0.0, **more):
    evaluation = EvalSection(every=every, prompts="eval", n=n, hold_seconds=hold)
    run = RunSection(steps=steps, max_consecutive_failures=0, drain_timeout_seconds=1e6)
    return simulate(bounded_world(eval_prompts=prompts, **world or {}), section, run, evaluation=evaluation, **more)


def test_J01_the_evaluation_of_the_last_version_has_all_its_results_before_the_run_ends():
    result = whole(4, prompts=5, n=3, world={"seconds": lambda prompt, _: Fixed(9.0 if prompt.id.startswith("eval") else 0.5)})
    assert [(event.version, event.ok) for event in of(EvalFinished, result)][-1] == (12, 15)
    assert result.rows["eval"][-1]["rollouts"] == 15


def test_C04_after_the_last_version_an_evaluation_that_is_pending_completes_though_the_gate_is_closed():
    """The trainer has ended, no group may start, and two fifths of the evaluation have not begun."""
    result = whole(12, prompts=40, n=1, section=bounded("mask", 2, groups_per_batch=4, group_size=4, max_concurrent=24))
    draining = next(event.time for event in of(Draining, result))
    assert result.reason == "all 12 steps are trained"
    [finished] = of(EvalFinished, result)
    assert (finished.version, finished.ok) == (12, 40)
    assert finished.time > draining


def test_J02_each_due_version_is_evaluated_once_after_it_is_served_and_none_beyond_the_end():
    result = whole(1, prompts=3, steps=8, world={"engines": [EngineSettings(transfer_seconds=0.4)]}, hold=100.0)
    published = {event.version: event.time for event in of(Published, result)}
    started = {event.version: event.time for event in of(EvalStarted, result)}
    assert Counter(event.version for event in of(EvalStarted, result)).most_common(1)[0][1] == 1
    assert all(time >= published[version] for version, time in started.items())
    assert max(started) == 8
    assert all(row["version_min"] == row["version_max"] == row["version"] for row in result.rows["eval"])


def test_J04_failing_evaluation_rollouts_are_counted_and_end_nothing():
    result = whole(3, prompts=30, world={"faults": (Fault("environment_error", 0.3, retryable=False),)})
    assert len(result.batches) == 12
    for row in result.rows["eval"]:
        assert row["ok"] + row["failed"] == row["rollouts"] == 30
        assert row["failed"] > 0
        assert row["reward_mean_all"] < row["reward_mean"]


def test_J05_a_large_evaluation_shares_the_limit_cancels_nothing_and_leaves_training_its_pace():
    section = bounded("mask", 2, groups_per_batch=4, group_size=4, max_concurrent=64)
    result = whole(40, prompts=1000, steps=120, section=section)
    assert result.peak <= 64
    assert not {"cancelled"} & result.ledger.dropped.keys()
    assert all(event.ok == 1000 for event in of(EvalFinished, result))
    times = [event.time for event in of(BatchAcknowledged, result)]
    steps = sorted(after - before for before, after in pairwise(times))
    first_after = next(time for time in times if time > of(EvalFinished, result)[0].time)
    before = max(time for time in times if time < first_after)
    assert first_after - before < 2 * steps[len(steps) // 2]


def test_J08_an_evaluation_of_37_prompts_and_3_rollouts_each_is_111_attempts():
    result = whole(12, prompts=37, n=3)
    assert [event.ok + event.failed for event in of(EvalFinished, result)] == [111]


def test_K03_rows_of_evaluations_carry_the_version_that_they_are_of():
    result = whole(5, prompts=3, steps=10, hold=100.0)
    assert [row["version"] for row in result.rows["eval"]] == [5, 10]
    assert [event.version for event in of(EvalFinished, result)] == [5, 10]


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_K01_failures_lower_the_mean_over_all_members_and_have_their_share(share):
    faults = (Fault("environment_error", share, retryable=False),) if share else ()
    result = play(bounded_world(faults=faults, rollouts={}), bounded("mask", 2, groups_per_batch=16, group_size=8), 12)
    for row in result.rows["metrics"]:
        members = row["rollouts"] + row["lost_rollouts"]
        assert members == 16 * 8
        assert row["lost_share"] == row["lost_rollouts"] / members
        assert row["reward_mean_all"] == pytest.approx(row["reward_mean"] * (1 - row["lost_share"]))
    mean_share = sum(row["lost_share"] for row in result.rows["metrics"]) / 12
    assert mean_share == pytest.approx(share, abs=0.08)


def test_K06_every_cause_is_in_every_row_with_0_too():
    trainer = TrainerSettings(seconds=Fixed(1.0))
    world = bounded_world(trainer=trainer, faults=(Fault("timeout", 0.02, retryable=False),))
    result = play(world, SECTION, 20, metrics=MetricsSection(interval_seconds=1.0))
    causes = set(get_args(Cause))
    for row in result.rows["pipeline"]:
        assert row["dropped"].keys() == row["lost"].keys() == causes
    assert result.rows["pipeline"][0]["lost"]["timeout"] == 0
    assert result.rows["pipeline"][-1]["lost"]["timeout"] > 0
    keys = [set(row) for row in result.rows["metrics"]]
    assert all(each == keys[0] for each in keys)
