"""Whole runs on virtual time, by the orchestrator that ships: the configured bound is the observed bound, and nothing is lost or hangs."""

import math
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.errors import EmptyBatches, EngineFailed, EnvironmentFailed, PromptError, StorageError, TrainerFailed
from headway.events import (
    Admitted,
    BatchAcknowledged,
    BatchFormed,
    Draining,
    Ended,
    EvalFinished,
    EvalStarted,
    Finished,
    GroupDropped,
    Published,
    Ready,
    RolloutDropped,
    SourceExhausted,
)
from headway.rules.batching import MAX_REQUEUES
from headway.rules.ledger import Ledger, apply
from headway.settings import EvalSection, FinishWhen, RolloutSection, RunSection
from headway.sim.distributions import Empirical, Fixed, Lognormal, Pareto, Uniform, mixture
from headway.sim.engine import EngineSettings
from headway.sim.journal import SimJournal
from headway.sim.loop import NoEnd
from headway.sim.run import WorldSettings, simulate
from headway.sim.trainer import TrainerSettings
from headway.sim.worker import Fault, RolloutSettings

B, G, STEPS = 4, 4, 20
AMPLE, SCARCE = 20 * B * G, 2 * G
LATENCIES = {"fixed": Fixed(1.0), "uniform": Uniform(0.5, 1.5), "lognormal": Lognormal(1.0, 1.0), "pareto": Pareto(1.0, 2.0)}
FAULTS = {
    "sound": (),
    "faulty": (Fault("environment_error", 0.1), Fault("worker_died", 0.02, retryable=False), Fault("engine_error", 0.03)),
}
ALWAYS_ONE = RolloutSettings(reward=1.0)


def world(latency=LATENCIES["lognormal"], faults=(), **more):
    return WorldSettings(rollouts=RolloutSettings(seconds=latency, faults=faults, reward=one_of_each), **more)


def one_of_each(prompt, member, drawn):
    return float(member % 2)  # no group scores alike


def rollout(max_staleness=2, max_concurrent=AMPLE, **more):
    section = {"groups_per_batch": B, "group_size": G, "max_staleness": max_staleness, "steps_ahead": max_staleness}
    return RolloutSection(**section | {"max_concurrent": max_concurrent} | more)


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def check(result, section):
    """Assert what holds of every run, whatever happened in it."""
    if section.on_stale != "train":
        assert result.max_staleness <= section.max_staleness
    assert result.peak <= section.max_concurrent
    ledger = Ledger()
    endings: Counter[int] = Counter()
    members: Counter[tuple[int, int]] = Counter()
    formed: list[int] = []
    births: dict[int, int] = {}
    times = [event.time for event in result.events]
    assert times == sorted(times)
    for event in result.events:
        match event:
            case Admitted():
                assert event.birth == ledger.version
                births[event.group] = event.birth
            case GroupDropped():
                endings[event.group] += 1
            case BatchFormed():
                assert event.k - ledger.trained <= section.max_lead
                chosen = [births[group] for group in event.groups]
                left = [unit.birth for group, unit in ledger.ready.items() if group not in event.groups]
                assert chosen == sorted(chosen)
                assert not left or max(chosen) <= min(left)
                endings.update(event.groups)
                formed.append(event.k)
            case Finished():
                members[event.group, event.member] += 1
            case RolloutDropped(final=True):
                members[event.group, event.member] += 1
        apply(ledger, event)
        assert ledger.rollouts_in_flight <= section.max_concurrent
        assert 0 <= ledger.version <= ledger.trained <= ledger.next_batch or ledger.version == -1
    live = {*ledger.running, *ledger.ready}
    assert set(endings.values()) <= {1}, "a group ended twice"
    assert births.keys() == endings.keys() | live, "a group has no ending"
    assert not endings.keys() & live
    assert set(members.values()) <= {1}, "a rollout ended twice"
    assert formed == list(range(len(formed)))
    assert list(result.batches) == formed
    assert all(len(batch.groups) == section.groups_per_batch for batch in list(result.batches.values())[:-1])
    assert not ledger.running
    assert ledger == result.ledger
    assert isinstance(result.events[-1], Ended)


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


# -------------------------------------------------------------------------------------------------------------------------- the ends


def test_a_drain_admits_no_more_finishes_what_is_in_flight_and_publishes_what_is_formed():
    section = rollout()
    result = simulate(world(), section, RunSection(steps=1000), drain_at=20.0)
    check(result, section)
    drained = next(event.time for event in result.events if isinstance(event, Draining))
    assert (drained, result.reason) == (20.0, "asked to")
    assert max(event.time for event in of(Admitted, result.events)) <= drained
    assert max(event.time for event in of(Finished, result.events)) > drained
    assert result.ledger.version == result.ledger.trained == len(result.batches) < 1000
    assert result.ledger.ready, "groups that no batch took stay in the journal"
    assert not [event for event in of(GroupDropped, result.events) if event.time > drained]


def test_a_drain_cancels_what_outlasts_its_share_of_the_time():
    section = rollout(timeout_seconds=0)
    hanging = mixture((0.95, Fixed(1.0)), (0.05, Fixed(math.inf)))
    result = simulate(world(hanging), section, RunSection(steps=1000, drain_timeout_seconds=60), drain_at=10.0)
    check(result, section)
    cancelled = of(GroupDropped, result.events)
    assert cancelled
    assert {(event.cause, event.time) for event in cancelled} == {("cancelled", 40.0)}


def test_a_run_ends_when_its_reward_is_reached():
    target = FinishWhen(reward_above=0.4, over_batches=5)
    result = simulate(world(), rollout(), RunSection(steps=1000, finish_when=target))
    check(result, rollout())
    assert "above 0.4" in result.reason
    assert 5 <= len(result.batches) < 12


def test_P03_L01_at_the_end_of_the_data_the_rest_makes_a_smaller_batch():
    section = rollout()
    result = simulate(world(prompts=10, epochs=3), section, RunSection(steps=1000))
    check(result, section)
    dropped = len(of(GroupDropped, result.events))
    assert result.reason == "the prompts are used up"
    assert sum(len(batch.groups) for batch in result.batches.values()) == len(of(Admitted, result.events)) - dropped
    assert len(of(SourceExhausted, result.events)) == 1
    assert 30 <= len(of(Admitted, result.events)) <= 30 * (1 + MAX_REQUEUES)
    assert not result.ledger.ready


def test_a_stale_group_is_dropped_and_its_prompt_tried_again_a_bounded_number_of_times():
    slow = mixture((0.95, Fixed(0.5)), (0.05, Fixed(30.0)))
    section = rollout(0, steps_ahead=0, timeout_seconds=0)
    result = simulate(world(slow, prompts=40, epochs=1), section, RunSection(steps=1000))
    check(result, section)
    tries = Counter(event.prompt_id for event in of(Admitted, result.events))
    assert len(tries) == 40
    assert max(tries.values()) <= 1 + MAX_REQUEUES
    assert all(event.cause == "stale" for event in of(GroupDropped, result.events))


# ----------------------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("max_concurrent", [G, 2 * G + 1, AMPLE])
def test_J05_evaluation_and_training_both_get_on_however_scarce_the_slots(max_concurrent):
    evaluation = EvalSection(every=4, prompts="eval", n=2, hold_seconds=5.0, at_start=True)
    section = rollout(2, max_concurrent)
    result = simulate(world(eval_prompts=12), section, RunSection(steps=STEPS), evaluation=evaluation)
    check(result, section)
    assert len(result.batches) == STEPS
    finished = of(EvalFinished, result.events)
    assert len(finished) == len(of(EvalStarted, result.events)) == len(result.rows["eval"])
    assert finished[0].version == 0
    assert finished[-1].version == STEPS
    assert all(event.ok == 24 for event in finished)
    for row in result.rows["eval"]:
        assert row["mixed"] or row["version_min"] == row["version_max"] == row["version"]


def test_a_sync_waits_for_a_running_evaluation_no_longer_than_its_hold():
    def published_apart(hold):
        evaluation = EvalSection(every=3, prompts="eval", n=1, hold_seconds=hold)
        result = simulate(world(Fixed(10.0), eval_prompts=3), rollout(4), RunSection(steps=12), evaluation=evaluation)
        check(result, rollout(4))
        return [row["mixed"] for row in result.rows["eval"]]

    assert not any(published_apart(60.0))
    assert any(published_apart(0.5))


# ----------------------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("broken", "section", "error", "says"),
    [
        (world(trainer=TrainerSettings(dies_at=5)), rollout(), TrainerFailed, "died of batch 5"),
        (world(engines=[EngineSettings(dies_at=7.0)]), rollout(), EngineFailed, "engine-0 was lost: engine-0 died at 7 s"),
        (world(prompts_fail_after=30), rollout(), PromptError, "after 30 prompts"),
        (world(faults=(Fault("environment_error", 1.0),)), rollout(), EnvironmentFailed, "100 attempts in a row"),
        (WorldSettings(rollouts=ALWAYS_ONE), rollout(), EmptyBatches, "20 groups in a row.*zero_advantage"),
        (WorldSettings(rollouts=ALWAYS_ONE), rollout(dynamic_sampling=True), EmptyBatches, "20 groups in a row.*zero_advantage"),
        (WorldSettings(rollouts=ALWAYS_ONE, prompts=3, epochs=1), rollout(), EmptyBatches, "used up"),
    ],
    ids=["trainer", "engine", "source", "environment", "reward", "dynamic sampling", "few prompts"],
)
def test_what_breaks_ends_the_run_with_its_name(broken, section, error, says):
    with pytest.raises(error, match=says):
        simulate(broken, section, RunSection(steps=1000), limit_seconds=10_000)


def test_a_journal_that_cannot_be_written_ends_the_run():
    with pytest.raises(StorageError, match="full after 500"):
        simulate(world(), rollout(), RunSection(steps=1000), journal=SimJournal(fails_at=500))


def test_a_trainer_that_hangs_stops_the_run_and_not_the_bound():
    journal = SimJournal()
    with pytest.raises(NoEnd, match="weight watcher: follow"):
        simulate(
            world(trainer=TrainerSettings(late={3: math.inf})), rollout(), RunSection(steps=STEPS), journal=journal, limit_seconds=1000
        )
    assert [event.k for event in of(BatchAcknowledged, journal.events)] == [0, 1, 2]
    assert [event.k for event in of(BatchFormed, journal.events)] == [0, 1, 2, 3, 4]
    assert max(event.time for event in of(Admitted, journal.events)) < 100


def test_rollouts_that_hang_end_at_their_deadline_and_their_groups_train_without_them():
    hanging = mixture((0.97, Fixed(1.0)), (0.03, Fixed(math.inf)))
    section = rollout(4, timeout_seconds=30.0)
    result = simulate(world(hanging), section, RunSection(steps=STEPS, max_consecutive_failures=0))
    check(result, section)
    admitted = {event.group: event.time for event in of(Admitted, result.events)}
    lost = of(RolloutDropped, result.events)
    assert {event.cause for event in lost} == {"timeout"}
    assert {round(event.time - admitted[event.group], 9) for event in lost} == {30.0}
    ready = {event.group for event in of(Ready, result.events)}
    assert {event.group for event in lost} & ready, "a group that lost one member of four still trains"
    assert len(result.batches) == STEPS


def test_attempts_are_retried_up_to_their_limit_and_then_the_member_is_lost():
    section = rollout(max_attempts=3)
    result = simulate(world(faults=(Fault("environment_error", 0.5),)), section, RunSection(steps=10, max_consecutive_failures=0))
    check(result, section)
    attempts = Counter((event.group, event.member) for event in of(RolloutDropped, result.events))
    assert max(attempts.values()) == 3
    assert all(event.attempt == 2 for event in of(RolloutDropped, result.events) if event.final)
    incomplete = [event for event in of(GroupDropped, result.events) if event.cause == "incomplete"]
    assert all("3 of 4" in event.detail for event in incomplete)


def test_a_version_counts_once_every_engine_serves_it():
    engines = [EngineSettings(transfer_seconds=0.1), EngineSettings(transfer_seconds=2.5)]
    section = rollout(4)
    result = simulate(world(Fixed(1.0), engines=engines), section, RunSection(steps=STEPS))
    check(result, section)
    published = of(Published, result.events)
    assert [event.engines for event in published[:1]] == [("engine-0", "engine-1")]
    versions = [event.version for event in published]
    assert versions == sorted(versions)
    assert any(later - earlier > 1 for earlier, later in pairwise(versions)), "a slow sync skips versions"
    assert versions[-1] == STEPS
