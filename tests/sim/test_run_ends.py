"""How whole runs on virtual time end, what evaluations take from them, and what becomes of one in which something breaks."""

import math
from collections import Counter
from itertools import pairwise

import pytest
from whole_runs import ALWAYS_ONE, AMPLE, STEPS, G, check, of, rollout, world

from headway.errors import EmptyBatches, EngineFailed, EnvironmentFailed, PromptError, StorageError, TrainerFailed
from headway.events import (
    Admitted,
    BatchAcknowledged,
    BatchFormed,
    Draining,
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
from headway.settings import EvalSection, FinishWhen, RunSection
from headway.sim.distributions import Fixed, mixture
from headway.sim.engine import EngineSettings
from headway.sim.journal import SimJournal
from headway.sim.loop import NoEnd
from headway.sim.run import WorldSettings, simulate
from headway.sim.trainer import TrainerSettings
from headway.sim.worker import Fault

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
