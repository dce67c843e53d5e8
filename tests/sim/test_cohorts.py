"""The cohort stepper agrees with the virtual loop: exactly where nothing is drawn, and as two draws of one world agree otherwise."""

from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.events import BatchAcknowledged, Finished, Published
from headway.settings import RolloutSection
from headway.sim.cohort_draws import queued_starts
from headway.sim.cohort_scope import NotForCohorts, refusal
from headway.sim.cohorts import step
from headway.sim.distributions import Empirical, Fixed, Lognormal, Pareto, Uniform, mixture
from headway.sim.figures import summarise
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

SPEED = 10_000.0  # tokens a second: fixed latencies are whole numbers of tokens


def scenario(seconds, *, steps=40, warm_up=None, sync=0.02, jitter=0.0, seed=0, **rollout):
    section = {
        "groups_per_batch": 8,
        "group_size": 1,
        "max_concurrent": 10**6,
        "max_staleness": 4,
        "steps_ahead": 2,
        "timeout_seconds": 0.0,
    }
    return Scenario(
        workload=WorkloadSection(seconds=seconds),
        training=TrainingSection(seconds=1.0, jitter=jitter),
        fleet=FleetSection(tokens_per_second=SPEED, sync_seconds=sync),
        rollout=RolloutSection(**section | rollout),
        run=LengthSection(steps=steps, warm_up=warm_up, seed=seed),
    )


WORDS = {"by", "trainer_waits", "engines_wait", "gate_closed"}  # their sums are compared, the words need not be the same
APART = {  # compared where draws are
    "latency_mean",  # of the rollouts that were trained on, not of those that ended
    "ready_groups_max",  # at an instant in which a group is ready, dropped and another batch formed, it depends on when one looks
    "waiting_bytes_max",
}


def flat(figure, name=""):
    if isinstance(figure, tuple | list):
        figure = dict(enumerate(figure))
    if isinstance(figure, dict):
        return {path: value for key, part in figure.items() for path, value in flat(part, f"{name}.{key}").items()}
    return {name: figure}


def figures(summary):
    told = {name: value for name, value in msgspec.to_builtins(summary).items() if name not in WORDS | APART}
    return flat(told) | {".waits": sum(summary.trainer_waits.values()), ".closed": sum(summary.gate_closed.values())}


def a_tie_decides(events):
    """Say whether a rollout ended in the instant in which a sync began: chains of the same times meet, and a last bit decides."""
    ends = np.array([event.time for event in events if isinstance(event, Finished)])
    syncs = np.array([event.time for event in events if isinstance(event, BatchAcknowledged | Published)])
    return np.abs(ends[:, np.newaxis] - syncs).min(initial=1.0) < 1e-6


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seconds=st.sampled_from([0.3107, 0.9731, 1.7093, 3.1137]),
    mode=st.sampled_from(["mask", "wait", "drop", "train"]),
    bound=st.integers(1, 4),
    ahead=st.sampled_from([0.5, 1.0, 1.75, 4.0]),
    lead=st.integers(0, 2),
    sync=st.sampled_from([0.0, 0.0519]),
    members=st.integers(1, 3),
    groups=st.integers(2, 9),
    room=st.sampled_from([1.0, 1.3, 2.5, 100.0]),
)
def test_where_nothing_is_drawn_it_says_exactly_what_the_virtual_loop_says(seconds, mode, bound, ahead, lead, sync, members, groups, room):
    world = scenario(
        Fixed(seconds),
        steps=24,
        sync=sync,
        on_stale=mode,
        max_staleness=bound,
        steps_ahead=min(ahead, bound),
        max_lead=lead,
        group_size=members,
        groups_per_batch=groups,
        max_concurrent=round(groups * members * room),
        timeout_seconds=1000.0,
    )
    run = play(world)
    assume(not a_tie_decides(run.result.events))
    stepped, played = figures(step(world)), figures(summarise(run))
    assert stepped.pop(".in_flight_mean") == pytest.approx(played.pop(".in_flight_mean"), rel=1e-3)  # by sums at the edges of the window
    assert stepped == pytest.approx(played, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("tokens", "turns", "written"), [(10, 4, 10), (6, 4, 6), (7, 2, 7), (1000, 3, 1000), (2, 4, 4)])
def test_the_turns_of_a_rollout_have_its_tokens_together_and_one_each_at_least(tokens, turns, written):
    world = scenario(Fixed(tokens / SPEED), steps=12, sync=0.0)
    world = msgspec.structs.replace(world, workload=WorkloadSection(tokens=float(tokens), turns=turns))
    stepped, played = step(world), summarise(play(world))
    assert stepped.length_bias.tokens == pytest.approx([written] * 10)
    assert played.length_bias.tokens == pytest.approx([written] * 10)


LATENCIES = {
    "uniform": Uniform(0.2, 1.8),
    "lognormal .5": Lognormal(1.0, 0.5),
    "lognormal 1": Lognormal(1.0, 1.0),
    "measured": Empirical((0.5, 0.6, 0.9, 1.1, 1.4, 2.5)),
}


@pytest.mark.parametrize(
    ("latency", "mode", "room"),
    [
        ("uniform", "mask", 80),
        ("measured", "train", 80),
        ("lognormal .5", "mask", 2000),
        ("lognormal 1", "mask", 80),
        ("lognormal 1", "mask", 2000),
        ("lognormal 1", "drop", 80),
    ],
)
def test_draws_of_one_world_agree_in_rate_staleness_and_what_is_lost(latency, mode, room):
    def both(seed):
        world = scenario(
            LATENCIES[latency],
            steps=70,
            warm_up=10,
            jitter=0.1,
            seed=seed,
            on_stale=mode,
            groups_per_batch=64,
            max_concurrent=room,
            steps_ahead=2,
            max_staleness=3,
            timeout_seconds=0.0,
        )
        return step(world), summarise(play(world))

    pairs = [both(seed) for seed in (1, 2)]
    for name, tolerance in {
        "batches_per_hour": 0.02,
        "trained_tokens_per_second": 0.03,
        "in_flight_mean": 0.03,
        "latency_mean": 0.03,
    }.items():
        stepped, played = (fmean(getattr(pair[which], name) for pair in pairs) for which in (0, 1))
        assert stepped == pytest.approx(played, rel=tolerance), name
    stepped, played = (fmean(pair[which].staleness.mean for pair in pairs) for which in (0, 1))
    assert stepped == pytest.approx(played, rel=0.02, abs=0.02)
    assert fmean(pair[0].masked_share for pair in pairs) == pytest.approx(fmean(pair[1].masked_share for pair in pairs), abs=0.01)
    assert fmean(pair[0].head_coverage for pair in pairs) == pytest.approx(fmean(pair[1].head_coverage for pair in pairs), abs=0.01)
    lost = [fmean(sum(pair[which].tokens.lost.values()) / pair[which].tokens.sampled for pair in pairs) for which in (0, 1)]
    assert lost[0] == pytest.approx(lost[1], abs=0.015)


@settings(max_examples=60, deadline=None)
@given(
    latency=st.sampled_from([*LATENCIES.values(), Pareto(1.0, 1.5), mixture((0.95, Fixed(0.8)), (0.05, Fixed(9.0)))]),
    mode=st.sampled_from(["mask", "wait", "drop"]),
    bound=st.integers(0, 5),
    share=st.floats(0, 1),
    members=st.integers(1, 4),
    room=st.floats(1, 9),
    lead=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_the_bound_holds_and_the_tokens_add_up(latency, mode, bound, share, members, room, lead, seed):
    world = scenario(
        latency,
        steps=30,
        seed=seed,
        on_stale=mode,
        max_staleness=bound,
        steps_ahead=bound * share,
        group_size=members,
        max_concurrent=round(8 * members * room),
        max_lead=lead,
    )
    got = step(world)
    assert got.staleness.max <= bound
    assert got.staleness.head_max <= bound
    assert got.tokens.trained == sum(got.staleness.histogram)
    assert got.tokens.masked == sum(got.staleness.masked_histogram.values())
    assert got.tokens.sampled == got.tokens.trained + got.tokens.masked + sum(got.tokens.lost.values())
    assert got.masked_share == 0 or mode == "mask"
    assert got.in_flight_max <= world.rollout.max_concurrent
    assert 0 < got.trainer_busy <= 1
    assert got.trainer_busy + sum(got.trainer_waits.values()) == pytest.approx(1, abs=1e-6)
    assert sum(got.gate_closed.values()) == pytest.approx(1, abs=1e-6)
    assert got.rollouts_per_hour == pytest.approx(got.batches_per_hour * 8 * members)
    assert step(world) == got, "the same seed, the same result"


B, ALL = 256, 220
PUBLISHED = {  # useful tokens, waste, stalest: the table of the design page; "-": it depends on the draw of the longest rollout
    ("completion_order", "lognormal .5"): (0.995, 0, "-"),
    ("completion_order", "lognormal 1"): (0.99, 0, "-"),
    ("completion_order", "Pareto 2"): (0.99, 0, "-"),
    ("completion_order", "1 % at 20x"): (1.0, 0, "-"),
    ("gate_and_sweep", "lognormal .5"): (0.99, 0.01, 4),
    ("gate_and_sweep", "lognormal 1"): (0.82, 0.15, 4),
    ("gate_and_sweep", "Pareto 2"): (0.89, 0.08, 4),
    ("gate_and_sweep", "1 % at 20x"): (0.84, 0.06, 4),
    ("wait", "lognormal .5"): (0.85, 0, 4),
    ("wait", "lognormal 1"): (0.28, 0, 4),
    ("wait", "1 % at 20x"): (0.27, 0, 4),
    ("drop", "lognormal .5"): (0.99, 0.01, 4),
    ("drop", "lognormal 1"): (0.82, 0.13, 4),
    ("drop", "Pareto 2"): (0.89, 0.07, 4),
    ("drop", "1 % at 20x"): (0.84, 0.05, 4),
    ("mask", "lognormal .5"): (0.99, 0.002, 4),
    ("mask", "lognormal 1"): (0.90, 0.09, 4),
    ("mask", "Pareto 2"): (0.93, 0.06, 4),
    ("mask", "1 % at 20x"): (0.87, 0.14, 4),
    ("mask 8", "lognormal .5"): (0.99, 0, 8),
    ("mask 8", "lognormal 1"): (0.97, 0.02, 8),
    ("mask 8", "Pareto 2"): (0.96, 0.03, 8),
    ("mask 8", "1 % at 20x"): (0.91, 0.10, 8),
}
COLUMNS = {
    "lognormal .5": Lognormal(1.0, 0.5),
    "lognormal 1": Lognormal(1.0, 1.0),
    "Pareto 2": Pareto(1.0, 2.0),
    "1 % at 20x": mixture((0.99, Fixed(1 / 1.19)), (0.01, Fixed(20 / 1.19))),
}


@pytest.mark.parametrize(("row", "column"), list(PUBLISHED))
def test_the_table_of_the_design_page_comes_out(row, column):
    bound = 8 if row == "mask 8" else 4
    reference = row in {"completion_order", "gate_and_sweep"}
    mode = "train" if row == "completion_order" else "mask" if reference else row.split()[0]
    world = scenario(
        COLUMNS[column],
        steps=ALL,
        warm_up=20,
        jitter=0.1,
        on_stale=mode,
        groups_per_batch=B,
        max_concurrent=5 * B // 4,
        max_staleness=bound,
        steps_ahead=bound,
        max_lead=0,
    )
    got = step(world, policy=row if reference else "headway")
    useful, waste, stalest = PUBLISHED[row, column]
    wasted = got.tokens.masked + sum(got.tokens.lost.values())
    assert got.trained_tokens_per_second / (B * SPEED) == pytest.approx(useful, abs=0.02)
    assert wasted / got.tokens.sampled == pytest.approx(waste, abs=0.015)
    if stalest == "-":
        assert got.staleness.max > bound
    else:
        assert got.staleness.max == stalest


def test_ten_times_ten_thousand_rollouts_at_once():
    world = scenario(Lognormal(1.0, 1.0), steps=12, groups_per_batch=40_000, max_staleness=8, steps_ahead=2)
    got = step(world)
    assert got.in_flight_max > 100_000 * 0.6
    assert got.batches_per_hour == pytest.approx(3600, rel=0.03)


REFUSED: dict[str, dict[str, Any]] = {
    "engines that slow down with load": {"fleet": {"half_speed_at": 8.0}},
    "prefill that takes time": {"fleet": {"prefill_tokens_per_second": 100.0}},
    "engines with a queue": {"fleet": {"max_sequences": 8}},
    "engines with a KV limit": {"fleet": {"kv_tokens": 10_000}},
    'fleet.weight_sync = "wait"': {"fleet": {"weight_sync": "wait"}},
    'fleet.weight_sync = "abort_resume"': {"fleet": {"weight_sync": "abort_resume"}},
    'fleet.sync_order = "rolling"': {"fleet": {"sync_order": "rolling", "engines": 2}},
    "syncs that take each engine another time": {"fleet": {"sync_seconds": Uniform(0, 1), "engines": 2}},
    "tools between turns": {"workload": {"turns": 2, "tool_seconds": 1.0}},
    "a scorer that takes time": {"workload": {"score_seconds": 1.0}},
    "failures": {"workload": {"failures": (Failing(cause="environment_error", share=0.1),)}},
    "groups that score alike": {"workload": {"zero_advantage_share": 0.1}},
    "groups that a filter refuses": {"workload": {"filtered_share": 0.1}},
    "a trainer whose time depends on the batch's tokens": {"training": {"tokens_per_second": 100.0}},
    'rollout.enforce = "ship"': {"rollout": {"enforce": "ship"}},
    "batches sized by tokens": {"rollout": {"batch_tokens": 1000, "max_rollout_tokens": 100}},
    'rollout.steps_ahead = "auto"': {"rollout": {"steps_ahead": "auto"}},
    "rollouts that time out": {"rollout": {"timeout_seconds": 1.0}},
    "faults": {"faults": (Fault(at_seconds=1.0, what="engine_dies"),)},
    "evaluations": {"eval": EvaluationSection(prompts=4)},
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_it_has_no_vector_step_for_it_refuses_by_name(what):
    world = scenario(Lognormal(1.0, 1.0))
    changes = {
        name: msgspec.structs.replace(getattr(world, name), **change) if isinstance(change, dict) else change
        for name, change in REFUSED[what].items()
    }
    world = msgspec.structs.replace(world, **changes)
    assert what in refusal(world)
    with pytest.raises(NotForCohorts, match="the cohort stepper cannot do this scenario"):
        step(world)


def test_a_reference_policy_has_no_other_modes():
    assert issubclass(NotForCohorts, ConfigError)
    assert 'on_stale = "wait" with a reference policy' in refusal(scenario(Fixed(1.0), on_stale="wait"), "gate_and_sweep")
    assert refusal(scenario(Fixed(1.0), on_stale="wait")) == ""


@given(
    ends=st.lists(st.floats(0.01, 9), max_size=12),
    units=st.integers(1, 10),
    members=st.integers(1, 3),
    spare=st.integers(0, 4),
    seed=st.integers(0, 9),
)
def test_units_that_wait_start_when_a_slot_for_each_member_is_free(ends, units, members, spare, seed):
    most = max(len(ends) + spare, members)
    seconds = np.random.default_rng(seed).uniform(0.1, 5, (units, members))
    starts = queued_starts(np.array(ends), seconds, 0.0, most)
    assert (np.diff(starts) >= 0).all()
    spans = [(0.0, end) for end in ends] + [(start, start + one) for start, row in zip(starts, seconds, strict=True) for one in row]
    for number, start in enumerate(starts):
        busy = sum(begin <= start < end for begin, end in spans[: len(ends) + (number + 1) * members])
        assert busy <= most
        before = spans[: len(ends) + number * members]
        if start > 0:  # an instant earlier there was no room
            assert sum(begin < start <= end for begin, end in before) > most - members
