"""What a played scenario came to: against arithmetic where lengths are fixed, else against the reports of `headway inspect`."""

from functools import cache
from itertools import pairwise

import msgspec
import pytest
from run_directories import write_run

from headway.events import EvalFinished, Finished, RolloutDropped
from headway.reports.run_files import open_run
from headway.reports.staleness import staleness_report
from headway.reports.waste import waste_report
from headway.rules.waste import ROWS, waste
from headway.settings import RolloutSection
from headway.sim.distributions import Lognormal
from headway.sim.figures import summarise, timeline
from headway.sim.play import play
from headway.sim.scenario import (
    EvaluationSection,
    Failing,
    Fault,
    FleetSection,
    LengthSection,
    Scenario,
    TrainingSection,
    WorkloadSection,
)
from headway.sim.summary import percentile

FIXED = Scenario(
    workload=WorkloadSection(tokens=100.0),
    training=TrainingSection(seconds=4.0),
    fleet=FleetSection(tokens_per_second=50.0),
    rollout=RolloutSection(groups_per_batch=2, group_size=2, max_concurrent=16, max_staleness=2, steps_ahead=1),
    run=LengthSection(steps=20),
)
MIXED = Scenario(
    workload=WorkloadSection(
        tokens=Lognormal(100, 1.2),
        zero_advantage_share=0.2,
        failures=(Failing(cause="environment_error", share=0.05), Failing(cause="bad_reward", share=0.02, retried=False)),
    ),
    training=TrainingSection(seconds=Lognormal(2.0, 0.3)),
    fleet=FleetSection(engines=2, sync_seconds=0.3),
    rollout=RolloutSection(groups_per_batch=4, group_size=4, max_concurrent=40, max_staleness=2, timeout_seconds=30),
    run=LengthSection(steps=40, warm_up=0, seed=3),
    eval=EvaluationSection(every=5, prompts=6),
    faults=(Fault(at_seconds=40, what="engine_dies", engine=1, for_seconds=10), Fault(at_seconds=70, what="trainer_stalls", for_seconds=9)),
)


@cache
def played(scenario):
    return play(scenario)


def changed(scenario, **sections):
    """Return the scenario with keys of its sections changed: `rollout={"max_staleness": 3}`."""
    return msgspec.structs.replace(
        scenario, **{name: msgspec.structs.replace(getattr(scenario, name), **keys) for name, keys in sections.items()}
    )


# ---- fixed lengths: arithmetic


def test_a_trainer_that_is_never_waited_for_sets_the_rate():
    figures = summarise(played(FIXED))
    assert (figures.batches, figures.seconds) == (18, 72)
    assert (figures.batches_per_hour, figures.rollouts_per_hour, figures.trained_tokens_per_second) == (900, 3600, 100)
    assert (figures.trainer_busy, figures.trainer_waits) == (1, {})
    assert (figures.latency_mean, figures.cycle_seconds) == (2, 4)
    assert figures.tokens.sampled == figures.tokens.trained == 18 * 4 * 100
    assert (figures.tokens.masked, dict(figures.tokens.lost)) == (0, {})
    assert (figures.masked_share, figures.head_coverage) == (0, 1)
    assert figures.length_bias.tokens == (100.0,) * 10
    assert figures.length_bias.trained_share == pytest.approx((1.0,) * 10)
    assert figures.length_bias.head_coverage == pytest.approx((1.0,) * 10)


def test_engines_that_are_too_slow_set_it_and_the_trainer_says_what_it_waits_for():
    figures = summarise(played(changed(FIXED, training={"seconds": 0.5}, rollout={"max_concurrent": 4, "steps_ahead": 2})))
    assert figures.cycle_seconds == 2  # 4 rollouts at once, 2 seconds each
    assert figures.trainer_busy == pytest.approx(0.25)
    assert figures.trainer_waits == {"no batch is full: engines are busy with max_concurrent rollouts": pytest.approx(0.75)}
    assert (figures.engines_busy, figures.engines_wait) == (1, {})
    assert figures.gate_closed == {"concurrency": pytest.approx(1)}
    assert (figures.in_flight_mean, figures.in_flight_max) == (4, 4)


def test_a_gate_that_binds_is_what_the_trainer_waits_for():
    figures = summarise(played(changed(FIXED, training={"seconds": 0.5}, rollout={"max_staleness": 0, "steps_ahead": 0})))
    assert figures.cycle_seconds == pytest.approx(2.5)  # in turn: generate, train
    assert figures.trainer_waits == {"no batch is full: the gate is closed by staleness": pytest.approx(0.8)}
    assert figures.engines_wait == {"the gate is closed by staleness": pytest.approx(0.2)}
    assert (figures.staleness.max, figures.staleness.histogram) == (0, (18 * 4 * 100,))


def test_syncs_pause_engines_for_their_share_of_the_time():
    figures = summarise(played(changed(FIXED, fleet={"sync_seconds": 1.0})))
    assert figures.engines_paused == pytest.approx(1 / 4)
    assert figures.engines_wait["weight sync"] == figures.engines_paused


def test_tools_keep_engines_idle():
    figures = summarise(played(changed(FIXED, workload={"turns": 2, "tool_seconds": 1.0})))
    assert figures.engines_wait["its rollouts are with their environments"] > 0.1
    assert figures.latency_mean == 3


# ---- anything: what adds up, and what other readers of the same history say


def test_shares_of_the_time_add_up():
    figures = summarise(played(MIXED))
    assert figures.trainer_busy + sum(figures.trainer_waits.values()) == pytest.approx(1)
    assert figures.engines_busy + sum(figures.engines_wait.values()) == pytest.approx(1)
    assert figures.trainer_waits["it has stalled (a fault)"] * figures.seconds == pytest.approx(9, abs=3)  # it may have been idle before
    assert 9 < figures.engines_wait["it is lost (a fault)"] * 2 * figures.seconds < 20  # until it is found to be back


def test_every_token_that_an_engine_wrote_is_decided_or_known_to_be_undecided():
    run = played(MIXED)
    tokens = summarise(run).tokens
    assert tokens.trained + tokens.masked + sum(tokens.lost.values()) == tokens.sampled
    assert {"zero_advantage", "evaluation", "undelivered"} <= set(tokens.lost)
    fates = {row["batch"]: row["token_fates"] for row in run.result.rows["metrics"]}
    undecided = waste((event for event in run.result.events if event.time <= run.end), fates).rows
    open_ = undecided["waiting"] + undecided["in_flight"] + run.in_progress + run.eval_in_progress
    assert tokens.sampled + open_ == run.result.sampled_tokens


MODES = {
    "wait": {"rollout": {"on_stale": "wait"}},
    "drop": {"rollout": {"on_stale": "drop"}},
    "train": {"rollout": {"on_stale": "train"}},
    "ship": {"rollout": {"enforce": "ship"}},
    "by tokens": {"rollout": {"batch_tokens": 6000, "max_rollout_tokens": 1000}},
    "auto": {"rollout": {"steps_ahead": "auto", "max_staleness": 4}},
    "groups of one": {"rollout": {"group_size": 1}},
    "dynamic sampling": {"rollout": {"dynamic_sampling": True}},
    "loaded engines": {"fleet": {"half_speed_at": 8.0, "prefill_tokens_per_second": 2000.0, "kv_tokens": 6000, "max_sequences": 12}},
    "rolling": {"fleet": {"sync_order": "rolling", "weight_sync": "wait"}},
    "turns and scores": {"workload": {"turns": 3, "tool_seconds": Lognormal(1, 1), "observed_tokens": 20, "score_seconds": 0.5}},
}
CRASHES = (Fault(at_seconds=20, what="orchestrator_dies", for_seconds=8), Fault(at_seconds=60, what="trainer_dies", for_seconds=8))


@pytest.mark.parametrize("changes", [*MODES.values(), {"faults": CRASHES}], ids=[*MODES, "crashes"])
def test_whatever_the_scenario_shares_and_tokens_add_up(changes):
    scenario = changed(MIXED, run={"steps": 15, "warm_up": 4})
    faults = changes.get("faults")
    scenario = msgspec.structs.replace(scenario, faults=faults) if faults else changed(scenario, **changes)
    figures = summarise(play(scenario))
    tokens, staleness, bias = figures.tokens, figures.staleness, figures.length_bias
    assert figures.batches == 11
    assert figures.trainer_busy + sum(figures.trainer_waits.values()) == pytest.approx(1)
    assert figures.engines_busy + sum(figures.engines_wait.values()) == pytest.approx(1)
    assert all(why and share > 0 for why, share in {**figures.trainer_waits, **figures.engines_wait, **figures.gate_closed}.items())
    assert all(row in {*ROWS, "undelivered"} and count > 0 for row, count in tokens.lost.items())
    assert tokens.trained + tokens.masked + sum(tokens.lost.values()) == tokens.sampled
    assert sum(staleness.masked_histogram.values()) == tokens.masked
    assert tokens.trained <= sum(staleness.histogram) <= tokens.trained + tokens.lost.get("zero_advantage", 0)
    assert staleness.max <= scenario.rollout.max_staleness or scenario.rollout.on_stale == "train"
    assert list(bias.tokens) == sorted(bias.tokens)
    assert all(0 <= share <= 1 for share in (*bias.trained_share, *bias.head_coverage, figures.masked_share, figures.head_coverage))


def test_what_was_decided_before_and_in_a_window_is_what_was_decided_in_all():
    whole = summarise(played(MIXED)).tokens
    half = summarise(played(changed(MIXED, run={"warm_up": 20}))).tokens
    first = summarise(played(changed(MIXED, run={"steps": 20}))).tokens
    assert half.trained + first.trained == whole.trained
    assert half.masked + first.masked == whole.masked
    assert half.sampled + first.sampled == whole.sampled


def test_the_reports_of_a_run_with_this_history_say_the_same(tmp_path):
    run = played(MIXED)
    figures = summarise(run)
    directory = open_run(write_run(tmp_path / "run", run.result, MIXED.rollout))
    reported = staleness_report(directory).staleness
    assert list(figures.staleness.histogram) == reported.histogram
    assert dict(figures.staleness.masked_histogram) == reported.masked_histogram
    assert figures.staleness.mean == pytest.approx(reported.tokens.mean)
    assert (figures.staleness.p99, figures.staleness.max) == (reported.tokens.p99, reported.tokens.max)
    assert figures.staleness.head_mean == pytest.approx(reported.heads.mean)
    assert (figures.staleness.head_p99, figures.staleness.head_max) == (reported.heads.p99, reported.heads.max)
    assert figures.masked_share == pytest.approx(reported.masked_share)
    assert figures.head_coverage == pytest.approx(reported.head_coverage)
    rows = {row.row: row.tokens for row in waste_report(directory).rows}
    for row, tokens in {"trained": figures.tokens.trained, "masked": figures.tokens.masked, **figures.tokens.lost}.items():
        if row != "undelivered":  # which engines had not been asked for at the end
            assert rows[row] == tokens, row


def test_the_tenths_by_length_hold_every_rollout_whose_fate_is_known():
    run = played(MIXED)
    figures = summarise(run)
    bias = figures.length_bias
    assert list(bias.tokens) == sorted(bias.tokens)
    assert bias.head_coverage[9] < min(bias.head_coverage[:5])  # the longest are too old when they end
    trained = sum(tokens * share for tokens, share in zip(bias.tokens, bias.trained_share, strict=True)) / sum(bias.tokens)
    contributing, masked = sum(figures.staleness.histogram), sum(figures.staleness.masked_histogram.values())
    beside = sum(tokens for row, tokens in figures.tokens.lost.items() if row in {"stale", "incomplete", "filtered"})
    assert trained == pytest.approx(contributing / (contributing + masked + beside), rel=0.02)


def test_latency_is_that_of_attempts_which_finished():
    run = played(changed(MIXED, run={"warm_up": 10}))
    seconds = [event.seconds for event in run.result.events if isinstance(event, Finished) and run.start < event.time <= run.end]
    assert summarise(run).latency_mean == pytest.approx(sum(seconds) / len(seconds))


def test_the_bound_holds_in_every_figure():
    figures = summarise(played(MIXED)).staleness
    assert figures.max <= 2
    assert figures.head_max <= 2
    assert min(figures.masked_histogram) > 2


def test_a_timeline_has_no_gaps_and_ends_with_the_window():
    run = played(MIXED)
    intervals = timeline(run)
    assert {each.who for each in intervals} == {"trainer", "engine-0", "engine-1", "gate"}
    for who in ("trainer", "engine-0", "engine-1", "gate"):
        mine = [each for each in intervals if each.who == who]
        assert (mine[0].start, mine[-1].end) == (0, run.end)
        assert all(one.end == other.start for one, other in pairwise(mine))
        assert all(each.why for each in mine if each.state not in {"training", "generating", "open"})


def test_the_same_scenario_comes_to_the_same_and_another_seed_to_something_else():
    again = summarise(play(MIXED))
    assert again == summarise(played(MIXED))
    assert again != summarise(played(changed(MIXED, run={"seed": 4})))


def test_the_history_that_is_told_of_holds_failures_and_evaluations():
    events = played(MIXED).result.events
    assert any(isinstance(event, RolloutDropped) and event.cause == "environment_error" for event in events)
    assert any(isinstance(event, EvalFinished) for event in events)


def test_percentiles_are_nearest_rank():
    assert percentile({0: 98, 7: 2}, 0.99) == 7
    assert percentile({0: 99, 7: 1}, 0.99) == 0
    assert percentile({}, 0.99) == 0
