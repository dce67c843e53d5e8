"""The exhaustive search of small runs: no bound broken, no deadlock, no leak, in any state that any order of events leads to.

What CI leaves out for its length (`make fuzz`, HEADWAY_FUZZ=1): every configuration up to S = 2, B = 2, all quarters of A, lead 0 to 2.
"""

import os
import sys

import pytest
from small_world import ENDLESS, SmallWorld

from headway.rules.admission import GateLimits

FUZZ = bool(os.environ.get("HEADWAY_FUZZ"))
BOUNDED = ("mask", "wait", "drop")


def limits(**values):
    return GateLimits(**{"group_size": 1, "max_concurrent": ENDLESS, "steps": ENDLESS} | values)


def core():
    """Every A in steps of 1 / (2 B), every lead: what STALENESS.md says was searched."""
    for mode in BOUNDED:
        for bound in range(3):
            for groups in (1, 2):
                for part in range(2 * groups * bound + 1):
                    for lead in range(3):
                        ahead = part / (2 * groups)
                        yield limits(max_staleness=bound, groups_per_batch=groups, steps_ahead=ahead, max_lead=lead, on_stale=mode)


def short(config):
    """Whether a search takes less than about a second. Where tokens are masked, states also tell newest stamps apart."""
    return config.on_stale != "mask" or config.groups_per_batch * (config.steps_ahead + 1) <= 5


CORE = [config for config in core() if FUZZ or short(config)]


def searched(configs, **more):
    found = [SmallWorld(config, **more).search() for config in configs]
    line = f"{len(found)} configurations, {sum(one.states for one in found)} states, {sum(one.moves.total() for one in found)} moves"
    sys.stdout.write(f"{line}\n")  # pytest -s shows it
    return found


@pytest.mark.parametrize("mode", BOUNDED)
def test_no_state_of_a_small_run_is_over_its_bound_or_stuck_or_leaks(mode):
    configs = [config for config in CORE if config.on_stale == mode]
    found = searched(configs)
    assert all(one.most_stale <= config.max_staleness for one, config in zip(found, configs, strict=True))
    reached = [one.most_stale for one, config in zip(found, configs, strict=True) if config.steps_ahead == config.max_staleness]
    assert max(reached) == max(config.max_staleness for config in configs)
    assert all(one.moves["form"] for one in found)


@pytest.mark.parametrize("mode", BOUNDED)
@pytest.mark.parametrize("replayed", [1, 2])
def test_places_for_replay_break_nothing(mode, replayed):
    bounds = (0, 1, 2) if FUZZ else (0, 1)
    common = {"groups_per_batch": 2, "on_stale": mode, "replayed_groups": replayed}
    found = searched(
        limits(max_staleness=bound, steps_ahead=part / 2, **common) for bound in bounds for part in range(2 * bound + 1) if FUZZ or part < 3
    )
    assert all(one.moves["place"] and one.moves["place lost"] and one.moves["place filled"] for one in found)


@pytest.mark.parametrize("mode", BOUNDED)
@pytest.mark.parametrize("replayed", [0, 1])
def test_batches_sized_by_tokens_break_nothing(mode, replayed):
    bounds = (0, 1, 2)
    common = {"groups_per_batch": 1, "on_stale": mode, "replayed_groups": replayed}
    for tokens in (2, 3):
        searched((limits(max_staleness=bound, steps_ahead=float(bound), batch_tokens=tokens, **common) for bound in bounds), tokens=(1, 2))


@pytest.mark.parametrize("mode", BOUNDED)
def test_a_pace_that_changes_at_any_time_breaks_nothing(mode):
    """Also one above S: `rules.admission.steps_ahead` does not follow it there."""
    for bound in (0, 1):
        config = limits(max_staleness=bound, steps_ahead=0.0, groups_per_batch=2, on_stale=mode)
        searched([config], paces=(0.0, 0.5, 1.0) if FUZZ or mode != "mask" else (0.0, 1.0))


@pytest.mark.parametrize("mode", BOUNDED)
def test_scarce_engines_break_nothing(mode):
    searched(
        limits(max_staleness=bound, steps_ahead=float(bound), groups_per_batch=2, on_stale=mode, max_concurrent=slots)
        for bound in ((0, 1, 2) if FUZZ or mode != "mask" else (0, 1))
        for slots in (1, 2)
    )


@pytest.mark.parametrize("mode", ["mask", "drop"])
@pytest.mark.parametrize("replayed", [0, 1])
def test_enforced_at_the_shipper_nothing_over_the_bound_ships_and_nothing_is_stuck(mode, replayed):
    found = searched(
        limits(
            max_staleness=bound,
            steps_ahead=0.0,
            groups_per_batch=2,
            on_stale=mode,
            max_concurrent=slots,
            enforce="ship",
            max_ready_groups=2,
            replayed_groups=replayed,
        )
        for bound in ((0, 1, 2) if FUZZ else (0, 1))
        for slots in (1, 2)
    )
    assert all(one.moves["form"] for one in found)


def test_the_search_sees_a_gate_that_is_too_wide():
    """Were A above S, line 1 of the invariant would not hold; the search must say so, or it shows nothing."""

    class TooWide(SmallWorld):
        def _fold(self, ledger, tails):
            state = super()._fold(ledger, tails)
            births = sorted([*state.running, 0]) if len(state.running) < 3 else state.running
            return type(state)(state.lag, state.untrained, tuple(births), state.ready)

    with pytest.raises(AssertionError, match=r"H\(k\) is broken"):
        TooWide(limits(max_staleness=0, steps_ahead=0.0, groups_per_batch=1, on_stale="wait")).search()
