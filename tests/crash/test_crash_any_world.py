"""Runs that are killed at any moment in any world, and taken up again: finished work survives, each batch trains once, the bound holds."""

import os
from collections import Counter

import pytest
from bound_world import LATENCIES, MODES, bounded, bounded_world
from crash_worlds import FAULTS, WITHOUT_END, Case, any_case
from lives import check_lives

from headway.events import Published, Resumed
from headway.sim.distributions import Fixed
from headway.sim.engine import EngineSettings
from headway.sim.trainer import TrainerSettings
from headway.sim.world import Kill

FULL = bool(os.environ.get("HEADWAY_FUZZ"))
PART = 20
SEEDS = 4000 if FULL else 80


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_whatever_happens_to_whatever_run_the_promises_hold(first):
    became = Counter()
    for seed in range(first, first + PART):
        try:
            became += any_case(seed).checked()
        except BaseException as error:
            error.add_note(f"tests/helpers/crash_worlds.py: any_case({seed})")
            raise
    print(f"seeds {first} to {first + PART - 1}: {dict(became)}")  # noqa: T201  figures, for whoever plays thousands of them
    assert became["lives"] > PART
    assert became["continued groups"] + became["interrupted groups"] > 0


def small(mode, *kills, **more):
    """A run of 12 prompts whose world leaves little to one instant: commits and writes take time, some attempts fail."""
    world = bounded_world(LATENCIES["uniform"], prompts=12, epochs=1, seed=3, commit_seconds=0.01, write_seconds=0.05, faults=FAULTS)
    section = bounded(mode, 1, groups_per_batch=2, group_size=2, max_concurrent=12)
    return Case(world=world, section=section, kills=list(kills))


def writes(case):
    """How many times a run writes to the journal: bisected by whether a kill at the n-th write comes in time."""
    low, high = 1, 2
    while case(Kill(commit=high)).play().lives > 1:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if case(Kill(commit=middle)).play().lives > 1 else (low, middle)
    return low


@pytest.mark.parametrize("kept", [0, None], ids=["which is lost", "of which nobody hears"])
@pytest.mark.parametrize("mode", MODES if FULL else ["mask", "drop"])
def test_a_kill_at_every_commit(mode, kept):
    last = writes(lambda *kills: small(mode, *kills))
    assert last > 40
    for commit in range(1, last + 1):
        for trainer_dies in (False, True):
            case = small(mode, Kill(commit=commit, kept=kept, trainer_dies=trainer_dies))
            try:
                assert case.checked()["lives"] == 2
            except BaseException as error:
                error.add_note(f"commit {commit}, the trainer {'dies too' if trainer_dies else 'lives on'}")
                raise


def test_a_kill_at_every_event_with_which_a_run_is_taken_up():
    """Between Resumed and what follows it, and again while the next process takes the run up."""
    first = Kill(at=3.3, weights_lost=1)
    whole = small("drop", first, Kill(commit=1)).play()
    [start] = [index for index, event in enumerate(whole.events) if isinstance(event, Resumed)][:1]
    taken_up = next(index for index, event in enumerate(whole.events[start + 1 :]) if isinstance(event, Resumed)) + 1
    assert taken_up > 4
    for kept in range(taken_up + 1):
        for again in (None, 0, 1, 3):
            became = small("drop", first, Kill(commit=1, kept=kept), Kill(commit=1, kept=again)).checked()
            assert became["lives"] == 4


def test_a_process_that_dies_again_and_again_as_soon_as_it_has_begun_changes_nothing():
    case = small("mask", Kill(at=3.3), *[Kill(commit=1)] * 20)
    became = case.checked()
    assert became["lives"] == 22
    assert became["interrupted groups"] <= 6


@pytest.mark.parametrize("mode", MODES)
def test_training_that_goes_back_begins_a_new_lineage_and_nothing_of_the_old_one_is_trained(mode):
    """Three versions are lost that were acknowledged and served: their batches and all that their weights wrote are gone, and counted."""
    world = bounded_world(LATENCIES["lognormal 1"], prompts=60, epochs=1, trainer=TrainerSettings(seconds=Fixed(1.0)))
    section = bounded(mode, 2, groups_per_batch=2, group_size=2, max_concurrent=16)
    case = Case(world=world, section=section, kills=[Kill(at=12.5, weights_lost=3, trainer_dies=True)])
    result = case.play()
    books = check_lives(result, section, case.steps, prompts=case.prompts)
    [back] = [event for event in result.events if isinstance(event, Resumed)]
    lost = [k for k, _ in result.world.abandoned]
    assert lost == [back.version, back.version + 1, back.version + 2]
    assert result.world.parents == {back.lineage: f"sim-{back.version}"}
    assert books.evicted["lineage"] > 0
    assert {k: result.batches[k].lineage for k in result.batches} == {
        k: "sim" if k < back.version else back.lineage for k in range(len(result.batches))
    }
    began_anew = [batch for k, batch in result.batches.items() if k >= back.version]
    assert set(began_anew[0].groups) & {group for _, batch in result.world.abandoned for group in batch.groups}, "older stamps train again"


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("before", [0.05, 0.15, 0.25, 0.35])
def test_a_kill_in_the_middle_of_a_weight_sync_leaves_no_engine_paused(lost, before):
    """Also where the version that was on its way is lost, and the engines say that they serve the one that is to be served."""
    slow = EngineSettings(prepare_seconds=0.1, transfer_seconds=0.2, commit_seconds=0.1)
    world = bounded_world(Fixed(0.5), prompts=40, epochs=1, trainer=TrainerSettings(seconds=Fixed(1.0)), engines=[slow] * 2)
    section = bounded("mask", 2, groups_per_batch=2)
    published = next(event.time for event in Case(world=world, section=section, kills=[]).play().events if _publishes(event, 3))
    kill = Kill(at=published - before, weights_lost=lost, trainer_dies=True)
    assert Case(world=world, section=section, kills=[kill]).checked()["lives"] == 2


def _publishes(event, version):
    return isinstance(event, Published) and event.version == version


def test_lives_of_one_seed_are_lived_alike():
    one, two = (any_case(5).play() for _ in range(2))
    assert one.events == two.events
    assert one.lives > 1
    assert any_case(5).steps == WITHOUT_END
