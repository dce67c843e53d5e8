"""Selection bias: trained beside generated, and prompts that never get their turn."""

import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_strategies import batch_of, plain_sample, rollout_of
from run_directories import write_journal, write_run

from headway.errors import StorageError
from headway.events import (
    Admitted,
    BatchAcknowledged,
    BatchFormed,
    Finished,
    GroupDropped,
    Ingested,
    Published,
    Ready,
    Resumed,
    RolloutDropped,
)
from headway.formats.batch import RECORDS, assemble, write_batch
from headway.formats.run_directory import RunDirectory
from headway.reports.bias import RANGES, bias_report, ranges
from headway.reports.run_files import open_run
from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Lognormal
from headway.sim.run import WorldSettings, simulate
from headway.sim.worker import RolloutSettings
from headway.types import Cause


def finished(group, member, *, tokens=10, turns=1, seconds=1.0, reward=1.0, environment="maths", tail=0):
    return Finished(0.0, group, member, 0, reward, tokens + 5, tokens, 0, tail, None, environment, turns, seconds)


def report_of(tmp_path, events, **rollout):
    section = RolloutSection(max_staleness=2, **rollout)
    result = simulate(WorldSettings(), RolloutSection(groups_per_batch=1, group_size=2, max_concurrent=4), RunSection(steps=1))
    path = write_run(tmp_path / "run", result, section)
    shutil.rmtree(path / "state")
    write_journal(path / "state", events)
    return bias_report(open_run(path))


def group(number, prompt="p", *rollouts, scores=()):
    return [Admitted(0.0, number, prompt, 0, len(rollouts), 0), *rollouts, Ready(0.0, number, False, scores)]


def formed(k, *groups):
    return [BatchFormed(0.0, k, groups, 0.5), BatchAcknowledged(0.0, k)]


@given(st.lists(st.tuples(st.floats(-100, 100) | st.integers(0, 12).map(float), st.booleans()), min_size=1, max_size=300))
def test_ranges_hold_every_rollout_once(rollouts):
    values, trained = (np.array(column) for column in zip(*rollouts, strict=True))
    found = ranges(values.astype(np.float64), trained)
    assert 1 <= len(found) <= RANGES
    assert sum(each.generated for each in found) == len(values)
    assert sum(each.trained for each in found) == trained.sum()
    for number, each in enumerate(found):
        inside = (values == each.high) if each.low == each.high else (values > each.low) & (values <= each.high)
        if not number:
            inside |= values == each.low
        assert each.generated == inside.sum() > 0
        assert each.trained == (inside & trained).sum()


def test_many_values_are_cut_into_tenths():
    values = np.arange(1000, dtype=np.float64)
    assert [each.generated for each in ranges(values, values < 500)] == [100] * 10
    assert [each.trained for each in ranges(values, values < 500)] == [100] * 5 + [0] * 5


def test_trained_is_what_had_a_token_in_the_loss_of_a_trained_batch(tmp_path):
    events = [
        Published(0.0, 0, ("e",)),
        *group(0, "p", finished(0, 0, tokens=10, tail=0), finished(0, 1, tokens=20, tail=3)),
        *group(1, "p", finished(1, 0, tokens=30, tail=3), finished(1, 1, tokens=40, tail=3)),
        *group(2, "p", finished(2, 0, tokens=50)),
        Admitted(0.0, 3, "q", 0, 2, 0),
        finished(3, 0, tokens=60),
        RolloutDropped(0.0, 3, 1, 0, "timeout", "", 0, final=True),
        GroupDropped(0.0, 3, "incomplete", "", 60),
        Admitted(0.0, 4, "q", 0, 3, 0),
        finished(4, 1, tokens=60),
        GroupDropped(0.0, 4, "stale", "", 60, requeued=True),
        finished(4, 0, tokens=50),
        RolloutDropped(0.0, 1, 1, 0, "over_length", "", 40, final=True, finished=True),
        *[event for k in range(5) for event in (formed(k) if k != 4 else formed(4, 0, 1))],
        BatchFormed(0.0, 5, (2,), 0.5),
    ]
    report = report_of(tmp_path, events)
    [maths] = report.environments
    assert (maths.generated, maths.trained) == (8, 2)
    lengths = {each.low: each.trained for each in maths.audits[0].ranges}
    assert lengths == {10.0: 0, 20.0: 1, 30.0: 1, 40.0: 0, 50.0: 0, 60.0: 0}
    assert report.lost == {"stale": 1, "timeout": 1}
    assert (report.prompts, report.prompts_never_trained) == (2, 1)
    everything = report_of(tmp_path / "train", events, on_stale="train")
    assert everything.environments[0].trained == 3


def test_environments_stand_apart_and_scores_replace_rewards(tmp_path):
    rollouts = [finished(0, 0, reward=None, turns=3), finished(0, 1, reward=None, environment="guess", seconds=4.0)]
    report = report_of(tmp_path, [*group(0, "p", *rollouts, scores=((0, 0.25), (1, 0.75))), *formed(0, 0)])
    assert [environment.environment for environment in report.environments] == ["guess", "maths"]
    guess, maths = ({audit.quantity: audit for audit in environment.audits} for environment in report.environments)
    assert (guess["reward"].generated_mean, maths["reward"].trained_mean) == (0.75, 0.25)
    assert (guess["seconds"].generated_mean, maths["turns"].generated_mean) == (4.0, 3.0)


def test_a_rollout_without_a_reward_has_none_in_the_histogram(tmp_path):
    events = [Admitted(0.0, 0, "p", 0, 1, 0), finished(0, 0, reward=None)]
    [maths] = report_of(tmp_path, events).environments
    reward = maths.audits[3]
    assert (reward.quantity, reward.generated_mean, reward.ranges) == ("reward", None, [])


def test_replayed_rollouts_are_in_no_histogram(tmp_path):
    events = [Ingested(0.0, 0, "old", "replay", 1, 0), finished(0, 0, tokens=99), *group(1, "p", finished(1, 0)), *formed(0, 0, 1)]
    [maths] = report_of(tmp_path, events).environments
    assert (maths.generated, maths.trained) == (1, 1)


def test_a_batch_that_a_resume_dissolves_has_not_trained(tmp_path):
    events = [*group(0, "p", finished(0, 0)), *formed(0, 0), Resumed(0.0, 0, 0, "line")]
    assert report_of(tmp_path, events).environments[0].trained == 0


def test_prompts_that_starve_are_listed_those_given_up_first(tmp_path):
    events = []
    for number, (prompt, requeued) in enumerate([("a", True), ("a", True), ("b", True), ("b", False), ("c", False)]):
        events += [*group(number, prompt, finished(number, 0))]
        cause: Cause = "stale" if prompt != "c" else "filtered"
        events.append(GroupDropped(0.0, number, cause, "", 10, requeued))
    events += [*group(9, "a", finished(9, 0)), *formed(0, 9)]
    report = report_of(tmp_path, events)
    assert [(each.prompt_id, each.admitted, each.trained, each.requeued, each.given_up) for each in report.starved] == [
        ("b", 2, 0, 1, 1),
        ("a", 3, 1, 2, 0),
    ]
    assert (report.prompts, report.prompts_never_trained) == (3, 2)


@pytest.mark.parametrize(("on_stale", "biased"), [("train", False), ("mask", True)])
def test_a_tight_mask_takes_the_short_who_age_while_their_groups_run_and_no_bound_takes_none(tmp_path, on_stale, biased):
    rollout = RolloutSection(
        groups_per_batch=8, group_size=4, max_concurrent=400, max_staleness=1, steps_ahead=1, on_stale=on_stale, max_lead=0
    )
    result = simulate(WorldSettings(rollouts=RolloutSettings(seconds=Lognormal(2.0, 1.0))), rollout, RunSection(steps=40))
    [sim] = bias_report(open_run(write_run(tmp_path / "run", result, rollout))).environments
    length = next(audit for audit in sim.audits if audit.quantity == "length")
    assert len(length.ranges) == RANGES
    first, last = (length.ranges[place].trained / length.ranges[place].generated for place in (0, -1))
    assert (first < last - 0.05) == biased


def with_an_overlong_member(tmp_path):
    """A run of `overlong = "mask"` whose one batch kept a member out for its length; the record on disk is all that knows."""
    events = [*group(10, "p", finished(10, 0, tokens=2), finished(10, 1, tokens=9)), *formed(0, 10)]
    report = report_of(tmp_path, events, overlong="mask")
    assert report.environments[0].trained == 2, "no record: told by age alone"
    run = RunDirectory(tmp_path / "run")
    short, long = rollout_of([plain_sample([0, 0])], group=10, member=0), rollout_of([plain_sample([0] * 9)], group=10, member=1)
    write_batch(run, assemble(batch_of([[short, long]], k=0, max_staleness=2, overlong_masked={(10, 1)})), "sim")
    return run


def test_a_rollout_kept_out_for_its_length_has_not_trained(tmp_path):
    run = with_an_overlong_member(tmp_path)
    [maths] = bias_report(open_run(run.path)).environments
    assert {each.low: each.trained for each in maths.audits[0].ranges} == {2.0: 1, 9.0: 0}


def test_a_damaged_record_of_a_batch_is_named(tmp_path):
    run = with_an_overlong_member(tmp_path)
    (run.batch(0) / RECORDS).write_bytes(b"nothing of the kind")
    with pytest.raises(StorageError, match=r"00000000/rollouts\.parquet: is damaged"):
        bias_report(open_run(run.path))
