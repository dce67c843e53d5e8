"""Runs that are killed at any moment in any world, and taken up again: finished work survives, each batch trains once, the bound holds."""

import os
from collections import Counter

import pytest
from bound_world import LATENCIES, MODES, bounded, bounded_world
from crash_worlds import FAULTS, WITHOUT_END, Case, any_case

from headway.events import Resumed
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


def test_lives_of_one_seed_are_lived_alike():
    one, two = (any_case(5).play() for _ in range(2))
    assert one.events == two.events
    assert one.lives > 1
    assert any_case(5).steps == WITHOUT_END
