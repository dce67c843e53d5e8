"""The waste ledger of whole runs on virtual time: every token that the simulated engines wrote is in one row, to the last one."""

import math

import pytest
from run_directories import write_run

from headway.events import Admitted, EvalFinished, Finished, GroupDropped, RolloutDropped
from headway.reports.run_files import open_run
from headway.reports.waste import waste_report
from headway.rules.waste import ROWS
from headway.settings import EvalSection, RolloutSection, RunSection
from headway.sim.distributions import Fixed, Lognormal, Uniform, mixture
from headway.sim.engine import EngineSettings
from headway.sim.run import WorldSettings, simulate
from headway.sim.worker import Fault, RolloutSettings

LOGNORMAL = Lognormal(1.0, 1.0)


def section(**more):
    return RolloutSection(**{"groups_per_batch": 4, "group_size": 4, "max_concurrent": 200, "max_staleness": 2, "steps_ahead": 2} | more)


def first_two(rewards):
    return sum(rewards) < 3


def one_of_each(prompt, member, drawn):
    return float(member % 2)


def play(tmp_path, rollouts, rollout, *, steps=20, run=None, world=None, **more):
    result = simulate(
        WorldSettings(rollouts=rollouts, **world or {}), rollout, run or RunSection(steps=steps, max_empty_batches=1000), **more
    )
    report = waste_report(open_run(write_run(tmp_path / "run", result, rollout)))
    rows = {row.row: row.tokens for row in report.rows}
    assert list(rows) == [*ROWS, "undelivered"]
    assert report.problems == []
    assert min(rows.values()) >= 0
    assert rows["not_itemised"] == 0
    assert sum(rows.values()) == report.sampled_tokens == result.sampled_tokens == report.engine_sampled_tokens
    assert sum(row.share for row in report.rows) == pytest.approx(1)
    assert sum(report.failed_by_cause.values()) == rows["failed"]
    return rows, result, report


def sampled(kind, events, **fields):
    of_kind = (event for event in events if isinstance(event, kind))
    return sum(event.sampled_tokens for event in of_kind if all(getattr(event, name) == value for name, value in fields.items()))


def test_where_nothing_fails_everything_is_delivered(tmp_path):
    rows, result, _ = play(tmp_path, RolloutSettings(seconds=LOGNORMAL, reward=one_of_each), section())
    assert rows["undelivered"] == 0
    assert {name for name, tokens in rows.items() if tokens} <= {"trained", "masked", "stale", "waiting"}
    assert rows["trained"] == sum(sum(batch.tokens.values()) for batch in result.batches.values())
    assert rows["masked"] == sum(sum(batch.masked.values()) for batch in result.batches.values()) > 0


def test_failures_of_whole_turns_are_rows_by_cause_and_the_broken_turn_is_not_delivered(tmp_path):
    faults = (Fault("environment_error", 0.2), Fault("worker_died", 0.05, retryable=False), Fault("engine_error", 0.1))
    rollouts = RolloutSettings(seconds=LOGNORMAL, turns=4, faults=faults, reward=one_of_each)
    rows, result, report = play(tmp_path, rollouts, section(incomplete="drop"))
    assert report.failed_by_cause == {
        cause: tokens
        for cause in ("engine_error", "environment_error", "worker_died")
        if (tokens := sampled(RolloutDropped, result.events, cause=cause))
    }
    assert len(report.failed_by_cause) == 3
    assert rows["undelivered"] > 0
    assert rows["incomplete"] > 0


@pytest.mark.parametrize(
    ("more", "row"),
    [
        ({"on_stale": "drop"}, "undelivered"),
        ({"on_stale": "drop", "enforce": "ship"}, "stale"),
        ({"max_staleness": 1, "steps_ahead": 1}, "masked"),
        ({"dynamic_sampling": True}, "zero_advantage"),
    ],
    ids=["drop", "drop at ship", "mask", "dynamic sampling"],
)
def test_what_a_mode_gives_up_is_in_its_row(tmp_path, more, row):
    rows, _, _ = play(tmp_path, RolloutSettings(seconds=LOGNORMAL), section(**more))
    assert rows[row] > 0


def test_a_filter_has_a_row(tmp_path):
    rows, result, _ = play(tmp_path, RolloutSettings(seconds=LOGNORMAL), section(), world={"keep": first_two})
    dropped = {event.group for event in result.events if isinstance(event, GroupDropped) and event.cause == "filtered"}
    assert rows["filtered"] == sum(
        event.sampled_tokens for event in result.events if isinstance(event, Finished) and event.group in dropped
    )
    assert rows["filtered"] > 0


def test_what_a_scorer_refuses_has_finished_and_failed(tmp_path):
    def reward(prompt, member, drawn):
        return math.nan if drawn < 0.2 else float(member % 2)

    rollouts = RolloutSettings(seconds=LOGNORMAL, scored_apart=True, score_seconds=Uniform(0, 1), reward=reward)
    rows, result, report = play(tmp_path, rollouts, section())
    lost = [event for event in result.events if isinstance(event, RolloutDropped)]
    assert all(event.finished for event in lost)
    assert report.failed_by_cause == {"bad_reward": sum(event.sampled_tokens for event in lost)}
    assert rows["undelivered"] == 0


def test_evaluations_have_a_row_failures_and_all(tmp_path):
    rollouts = RolloutSettings(seconds=Fixed(1.0), turns=2, faults=(Fault("environment_error", 0.1),), reward=one_of_each)
    evaluation = EvalSection(every=4, prompts="eval", n=2)
    rows, result, _ = play(tmp_path, rollouts, section(), world={"eval_prompts": 6}, evaluation=evaluation)
    assert (
        rows["evaluation"]
        == sampled(EvalFinished, result.events)
        >= 100 * sum(event.ok for event in result.events if isinstance(event, EvalFinished))
    )


def test_a_drain_that_cancels_loses_what_was_being_written_to_the_token(tmp_path):
    slow = mixture((0.9, Fixed(1.0)), (0.1, Fixed(1e5)))
    rollouts = RolloutSettings(seconds=slow, tokens_per_second=10.0, reward=one_of_each)
    world = {"engines": [EngineSettings(pauses=False)]}
    run = RunSection(steps=1000, drain_timeout_seconds=60)
    rows, result, _ = play(tmp_path, rollouts, section(timeout_seconds=0), world=world, run=run, drain_at=10.0)
    admitted = {event.group: event for event in result.events if isinstance(event, Admitted)}
    finished = {(event.group, event.member) for event in result.events if isinstance(event, Finished)}
    cancelled = [event for event in result.events if isinstance(event, GroupDropped) and event.cause == "cancelled"]
    cut = [(event, member) for event in cancelled for member in range(4) if (event.group, member) not in finished]
    assert cut
    written = sum(int((event.time - admitted[event.group].time) * 10.0 + 1e-6) for event, _ in cut)
    assert rows["undelivered"] == written > 0
    assert rows["cancelled"] == sum(event.sampled_tokens for event in cancelled)
    assert rows["waiting"] > 0
    assert rows["in_flight"] == 0


def test_without_the_engines_count_the_report_says_so(tmp_path):
    rollout = section()
    result = simulate(WorldSettings(rollouts=RolloutSettings(reward=one_of_each)), rollout, RunSection(steps=4))
    report = waste_report(open_run(write_run(tmp_path / "run", result, rollout, counted=False)))
    assert report.engine_sampled_tokens is None
    assert [row.row for row in report.rows] == list(ROWS)
    assert report.sampled_tokens == report.delivered_tokens


def test_engines_that_count_less_than_was_delivered_are_a_problem_by_name(tmp_path):
    rollout = section()
    result = simulate(WorldSettings(rollouts=RolloutSettings(reward=one_of_each)), rollout, RunSection(steps=4))
    path = write_run(tmp_path / "run", result, rollout, counted=False)
    with (path / "pipeline.jsonl").open("a") as file:
        file.write('{"time": 1e9, "engine_sampled_tokens": 7}\n')
    [problem] = waste_report(open_run(path)).problems
    assert problem == f"the engines count 7 sampled tokens, and {result.sampled_tokens} were delivered by then"
