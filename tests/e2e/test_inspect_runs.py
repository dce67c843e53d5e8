"""`headway inspect` on real runs: the books close against the engine's own counter, and a run that goes on is read beside it."""

import pytest
from real_runs import Bench, Ended
from run_directories import strictly

from headway.cli import command_line

pytestmark = pytest.mark.e2e


def inspected(capsys, directory, what, *, code=0):
    assert command_line(["inspect", str(directory), what, "--json"]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return strictly(captured.out)


def assert_counted(report, ended):
    """The books are held against the engine's counter; return whether that was read when all was over: if the engine answered in 2 s."""
    assert report["sampled_tokens"] == report["engine_sampled_tokens"] + report["delivered_since"]
    counted = ended.rows("pipeline.jsonl")[-1]["engine_sampled_tokens"] is not None
    assert not counted or report["delivered_since"] == 0
    return counted


def test_a_whole_run_is_told_by_its_reports(whole_run: Ended, capsys):
    directory, rows = whole_run.run.directory, whole_run.rows("metrics.jsonl")
    staleness = inspected(capsys, directory, "staleness")["staleness"]
    assert staleness["contributing_tokens"] == sum(row["contributing_tokens"] for row in rows)
    assert staleness["tokens"]["max"] == max(row["token_staleness_max"] for row in rows)
    assert staleness["share_over_bound"] == 0
    bias = inspected(capsys, directory, "bias")
    [environment] = bias["environments"]
    assert environment["trained"] == sum(row["rollouts"] for row in rows)
    assert all(audit["ranges"] for audit in environment["audits"])


def test_the_books_of_a_real_run_close_against_its_engines_counter(whole_run: Ended, capsys):
    report = inspected(capsys, whole_run.run.directory, "waste")
    tokens = {row["row"]: row["tokens"] for row in report["rows"]}
    assert report["problems"] == []
    assert_counted(report, whole_run)
    assert report["sampled_tokens"] == sum(tokens.values())
    assert tokens["trained"] > 0
    assert tokens["evaluation"] > 0
    assert tokens["not_itemised"] == 0
    assert min(tokens.values()) >= 0
    assert report["sync_engine_seconds"] > 0


def test_a_run_that_goes_on_is_read_beside_it_and_an_engine_that_served_others_is_counted_from_the_start(bench: Bench, capsys):
    bench.hold(2)
    run = bench.start("run.steps=6", "metrics.interval_seconds=0.5", "environment.entry=world:slow", "rollout.timeout_seconds=600")
    run.until_batch(2)
    going = inspected(capsys, run.directory, "waste")
    assert going["problems"] == []
    assert not going["ended"]
    bench.go_on()
    ended = run.end()
    assert ended.code == 0, ended.err
    report = inspected(capsys, run.directory, "waste")
    assert report["problems"] == []
    assert report["ended"]
    assert report["delivered_tokens"] >= going["delivered_tokens"]
    counted, undelivered = assert_counted(report, ended), report["rows"][-1]
    assert undelivered["row"] == "undelivered"
    assert undelivered["tokens"] == 0 or not counted
