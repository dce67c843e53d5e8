"""Whole runs on virtual time, by the orchestrator that ships: the configured bound is the observed bound, and nothing is lost or hangs."""

import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from whole_runs import AMPLE, FAULTS, LATENCIES, SCARCE, STEPS, check, rollout, world

from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Empirical, Fixed, Uniform
from headway.sim.engine import EngineSettings
from headway.sim.run import WorldSettings, simulate
from headway.sim.trainer import TrainerSettings
from headway.sim.worker import RolloutSettings

# ------------------------------------------------------------------------------------------------------------------------- the bound


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("max_concurrent", [AMPLE, SCARCE], ids=["ample", "scarce"])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("latency", LATENCIES.values(), ids=LATENCIES)
def test_no_token_is_trained_on_past_the_bound(latency, max_staleness, max_concurrent, faults):
    section = rollout(max_staleness, max_concurrent)
    result = simulate(world(latency, faults, engines=[EngineSettings(transfer_seconds=0.02)]), section, RunSection(steps=STEPS))
    check(result, section)
    assert result.reason == f"all {STEPS} steps are trained"
    if max_concurrent == AMPLE and not faults:
        assert result.max_staleness == max_staleness, "with A = S and room to spare the bound is reached"


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    interleaving=st.none() | st.integers(0, 2**32),
    latency=st.sampled_from(list(LATENCIES.values())) | st.just(Empirical((0.0, 0.0, 1.0, 5.0))),
    faults=st.sampled_from(list(FAULTS.values())),
    groups=st.integers(1, 5),
    members=st.integers(2, 4),
    room=st.floats(1, 10),
    bound=st.integers(0, 3),
    ahead=st.floats(0, 1),
    max_lead=st.integers(0, 2),
    sync=st.floats(0, 3),
    trainer=st.floats(0.1, 3),
    commit=st.sampled_from([0.0, 0.01]),
    dynamic=st.booleans(),
    apart=st.booleans(),
)
def test_any_world_keeps_the_bound_and_closes_its_books(
    seed, interleaving, latency, faults, groups, members, room, bound, ahead, max_lead, sync, trainer, commit, dynamic, apart
):
    section = RolloutSection(
        groups_per_batch=groups,
        group_size=members,
        max_concurrent=int(members * groups * room) if room > 2 else members,
        max_staleness=bound,
        steps_ahead=bound * ahead,
        max_lead=max_lead,
        dynamic_sampling=dynamic,
    )
    settings = WorldSettings(
        seed=seed,
        rollouts=RolloutSettings(seconds=latency, faults=faults, scored_apart=apart, score_seconds=Uniform(0, 1)),
        engines=[EngineSettings(transfer_seconds=sync), EngineSettings(commit_seconds=sync / 2, pauses=False)],
        trainer=TrainerSettings(seconds=Uniform(0.5 * trainer, 1.5 * trainer)),
        commit_seconds=commit,
    )
    result = simulate(settings, section, RunSection(steps=6, max_empty_batches=1000), interleaving=interleaving, limit_seconds=10_000)
    check(result, section)
    assert len(result.batches) == 6


def test_without_a_bound_the_tail_is_trained_on_and_older_than_the_bound():
    section = rollout(1, on_stale="train")
    result = simulate(world(), section, RunSection(steps=40))
    check(result, section)
    assert result.max_staleness > 2
    assert result.masked_share == 0


def test_the_mask_cuts_the_tail_and_the_trainer_stays_busy():
    result = simulate(world(), rollout(4), RunSection(steps=100))
    assert 0 < result.masked_share < 0.4
    assert result.trainer_share > 0.9


def test_steps_ahead_sets_the_mean_and_leaves_the_bound_to_max_staleness():
    def mean(ahead):
        rows = simulate(world(), rollout(4, steps_ahead=ahead), RunSection(steps=60)).rows["metrics"][20:]
        return sum(row["token_staleness_mean"] for row in rows) / len(rows)

    assert mean(0) < mean(1) < mean(2) < mean(4) < 4


def test_on_policy_is_the_same_code_with_a_bound_of_zero():
    section = rollout(0)
    result = simulate(world(), section, RunSection(steps=STEPS))
    check(result, section)
    assert all(set(batch.tokens) == {0} and not batch.masked for batch in result.batches.values())


def test_a_late_trainer_closes_the_gate_and_nothing_gets_older():
    section = rollout(2)
    result = simulate(world(Fixed(1.0), trainer=TrainerSettings(late={5: 500.0})), section, RunSection(steps=STEPS))
    check(result, section)
    waiting = [row for row in result.rows["pipeline"] if 20 < row["time"] < 400]
    assert waiting
    assert all(row["capacity"] == 0 and row["capacity_reason"] == "staleness" for row in waiting)


# ----------------------------------------------------------------------------------------------------------------------- one history


def test_the_same_seed_plays_the_same_journal_event_for_event():
    def play(seed, interleaving=None):
        return simulate(world(faults=FAULTS["faulty"], seed=seed), rollout(), RunSection(steps=STEPS), interleaving=interleaving).events

    assert play(1) == play(1) != play(2)
    assert play(1, interleaving=3) == play(1, interleaving=3)


PROGRAM = """
from hashlib import sha256
from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Lognormal
from headway.sim.run import WorldSettings, simulate
from headway.sim.worker import Fault, RolloutSettings

ballast = [object() for _ in range(__SIZE__)]
world = WorldSettings(rollouts=RolloutSettings(seconds=Lognormal(1.0, 1.0), faults=(Fault("environment_error", 0.3),)))
section = RolloutSection(groups_per_batch=4, group_size=4, max_concurrent=64, max_staleness=1, max_attempts=1, incomplete="drop")
print(sha256(repr(simulate(world, section, RunSection(steps=10), drain_at=9.5).events).encode()).hexdigest())
"""


@pytest.mark.e2e
def test_the_same_seed_plays_the_same_journal_in_any_process():
    histories = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM.replace("__SIZE__", hash_seed)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
        ).stdout
        for hash_seed in ("1", "3000")
    }
    assert len(histories) == 1
