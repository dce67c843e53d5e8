"""The bound at its edges: fractional steps_ahead, leads, versions that jump or lag, engines of different speed, batches sized by tokens,
steps_ahead = "auto", and other orders of what happens at one instant.
"""

from itertools import pairwise

import pytest
from bound_world import LATENCIES, MODES, bounded, bounded_world, four_fifths, play

from headway.events import Admitted, BatchAcknowledged, BatchFormed, Finished, PaceChanged, Published
from headway.sim.distributions import Fixed, Uniform
from headway.sim.engine import EngineSettings
from headway.sim.trainer import TrainerSettings
from headway.sim.worker import Fault

FAULTS = (Fault("environment_error", 0.07), Fault("worker_died", 0.03, retryable=False))
AT_ADMISSION = [mode for mode, (enforce, _) in MODES.items() if enforce == "admission"]
SMALL = {"groups_per_batch": 8, "group_size": 2, "max_concurrent": 96}
STEPS = 20


def mean_staleness(result, after=10):
    tokens = [entry for batch in list(result.batches.values())[after:] for entry in batch.tokens.items()]
    return sum(age * count for age, count in tokens) / sum(count for _, count in tokens)


# -------------------------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("mode", AT_ADMISSION)
@pytest.mark.parametrize("ahead", [0.25, 0.5, 1.5, 2.75])
def test_a_fraction_of_a_batch_ahead_keeps_the_bound_and_the_books(mode, ahead):
    play(bounded_world(faults=FAULTS, keep=four_fifths), bounded(mode, 3, steps_ahead=ahead, **SMALL), STEPS)


def test_more_steps_ahead_are_staler_tokens_by_fractions_too():
    means = [mean_staleness(play(bounded_world(), bounded("mask", 4, steps_ahead=ahead, **SMALL), 60)) for ahead in (0, 0.5, 1, 1.5, 2, 4)]
    assert means == sorted(means)
    assert means[0] < 1 < 2 < means[-1] <= 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("max_lead", [0, 1, 2])
def test_a_batch_formed_early_keeps_the_bound(mode, bound, max_lead):
    section = bounded(mode, bound, max_lead=max_lead, **SMALL)
    result = play(bounded_world(LATENCIES["lognormal 1"], faults=FAULTS), section, STEPS)
    assert len(result.batches) == STEPS
    assert result.max_staleness == bound


# ------------------------------------------------------------------------------------------------------------------------------ versions


@pytest.mark.parametrize("pauses", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_versions_that_jump_because_the_trainer_is_faster_than_a_sync_keep_the_bound(mode, pauses):
    engines = [EngineSettings(transfer_seconds=2.5, pauses=pauses)]
    result = play(bounded_world(LATENCIES["uniform"], engines=engines), bounded(mode, 4, **SMALL), STEPS)
    versions = [event.version for event in result.events if isinstance(event, Published)]
    assert any(after - before > 1 for before, after in pairwise(versions))
    assert versions[-1] == STEPS
    assert result.max_staleness == 4


@pytest.mark.parametrize("mode", MODES)
def test_a_group_is_as_old_as_the_slowest_engine(mode):
    engines = [
        EngineSettings(transfer_seconds=0.05),
        EngineSettings(transfer_seconds=1.8),
        EngineSettings(commit_seconds=0.6, pauses=False),
    ]
    result = play(bounded_world(LATENCIES["lognormal .5"], engines=engines, faults=FAULTS), bounded(mode, 3, **SMALL), STEPS)
    births = {event.group: event.birth for event in result.events if isinstance(event, Admitted)}
    finished = [event for event in result.events if isinstance(event, Finished)]
    assert {event.head - births[event.group] for event in finished} > {0}, "some are written by an engine that is ahead"
    assert all(event.head >= births[event.group] for event in finished)
    assert result.max_staleness == 3


@pytest.mark.parametrize("mode", AT_ADMISSION)
def test_a_trainer_that_lags_closes_the_gate_and_nothing_gets_older(mode):
    trainer = TrainerSettings(seconds=Fixed(0.5), late={5: 200.0})
    result = play(bounded_world(Fixed(1.0), trainer=trainer), bounded(mode, 2, **SMALL), STEPS)
    assert result.max_staleness == 2
    assert not any(batch.masked for batch in result.batches.values())
    waiting = [row for row in result.rows["pipeline"] if 30 < row["time"] < 180]
    assert waiting
    assert {(row["capacity"], row["capacity_reason"]) for row in waiting} == {(0, "staleness")}


# -------------------------------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group_size", [1, 2])
def test_batches_sized_by_tokens_fill_their_budget_and_keep_the_bound(mode, group_size):
    longest, budget = 216, 6400  # tokens: 16 of the prompt, 100 a second
    sized = {"batch_tokens": budget * group_size, "max_rollout_tokens": longest}
    section = bounded(mode, 3, group_size=group_size, max_concurrent=200 * group_size, **sized)
    result = play(bounded_world(Uniform(0.2, 2.0), faults=FAULTS), section, STEPS)
    least = budget // longest
    sizes = [event.groups for event in result.events if isinstance(event, BatchFormed)]
    tokens = [row["tokens"] for row in result.rows["metrics"]]
    assert min(map(len, sizes)) >= least
    assert max(map(len, sizes)) > least, "short rollouts make room for more groups"
    assert max(tokens) <= budget * group_size
    assert sum(count > 0.9 * budget * group_size for count in tokens) > STEPS / 2, "most batches are full"
    assert result.max_staleness <= 3


# ----------------------------------------------------------------------------------------------------------------------------------- auto


def trained(result):
    """When each batch was, in seconds."""
    return [event.time for event in result.events if isinstance(event, BatchAcknowledged)]


def seconds(times):
    return times[-1] - times[0]


def test_auto_lowers_the_mean_staleness_slowly_and_costs_no_rate():
    bound = 8
    fixed = play(bounded_world(), bounded("mask", bound, **SMALL), 120)
    auto = play(bounded_world(), bounded("mask", bound, **SMALL | {"steps_ahead": "auto"}), 120)
    changes = [event for event in auto.events if isinstance(event, PaceChanged)]
    assert changes
    ahead = [2.0, *(event.steps_ahead for event in changes)]  # min(2, S) at first
    assert all(abs(after - before) == 0.5 for before, after in pairwise(ahead))
    assert max(ahead) <= bound
    at = [sum(time <= event.time for time in trained(auto)) for event in changes]
    assert all(after - before >= 8 for before, after in pairwise([0, *at])), "batches apart"
    assert mean_staleness(auto) < 0.5 * mean_staleness(fixed)
    middle = slice(40, 110)  # at the end every run waits for its stragglers
    assert seconds(trained(auto)[middle]) < 1.03 * seconds(trained(fixed)[middle])


# ------------------------------------------------------------------------------------------------------------------------- interleaving


@pytest.mark.parametrize("mode", MODES)
def test_every_order_of_what_happens_at_one_instant_keeps_the_bound(mode):
    world = bounded_world(Fixed(1.0), faults=FAULTS, trainer=TrainerSettings(seconds=Fixed(1.0)), engines=[EngineSettings()])
    histories = {tuple(map(repr, play(world, bounded(mode, 1, **SMALL), 12, interleaving=seed).events)) for seed in range(6)}
    assert len(histories) > 3, "the seeds play different histories"
