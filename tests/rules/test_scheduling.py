"""Turns, engines, seeds, delays, evaluations and ends: choices as plain functions."""

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.rules.ledger import Ledger
from headway.rules.scheduling import (
    backoff_seconds,
    eval_due,
    next_engine,
    publication_due,
    retry_delay_seconds,
    reward_reached,
    rollout_seed,
    run_is_complete,
    sync_must_wait,
    turn,
    why_barren,
)
from headway.rules.view import Unit
from headway.settings import EvalSection, FinishWhen
from headway.types import Prompt, Purpose


class Load(NamedTuple):
    """What `next_engine` compares, by name."""

    syncing: bool
    rollouts: int
    taken: int


UNIT = Unit("p", 0, 0, 2)


def evaluation(every=10, *, at_start=False):
    return EvalSection(every=every, prompts="p.jsonl", at_start=at_start)


@given(st.integers(0, 20), st.integers(1, 8), st.booleans(), st.booleans(), st.sampled_from(["train", "eval"]))
def test_a_turn_is_only_given_to_who_waits_and_fits(free, group_size, train_waits, eval_waits, last):
    chosen = turn(free=free, group_size=group_size, train_waits=train_waits, eval_waits=eval_waits, last=last)
    if chosen == "train":
        assert train_waits
        assert free >= group_size
        assert not (eval_waits and last == "train")
    elif chosen == "eval":
        assert eval_waits
        assert free >= 1
        assert not (train_waits and last == "eval")


@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 2**32))
def test_while_both_wait_they_are_served_in_turn_whatever_ends_when(group_size, spare, seed):
    """Freed slots are kept for whose turn it is: however rollouts end, nobody is passed over twice."""
    draw, free, served, in_flight = random.Random(seed), group_size + spare, [], []
    last: Purpose = "eval"
    while len(served) < 20:
        chosen = turn(free=free, group_size=group_size, train_waits=True, eval_waits=True, last=last)
        if chosen is None:
            free += in_flight.pop(draw.randrange(len(in_flight)))
            continue
        last = chosen
        served.append(chosen)
        in_flight += [1] * group_size if chosen == "train" else [1]
        free -= group_size if chosen == "train" else 1
        assert free >= 0
    assert served == ["train", "eval"] * 10


@given(st.integers(1, 8), st.integers(0, 8), st.sampled_from(["train", "eval"]))
def test_who_waits_alone_is_never_held_up_by_the_other(group_size, free, last):
    assert (turn(free=free, group_size=group_size, train_waits=True, eval_waits=False, last=last) == "train") == (free >= group_size)
    assert (turn(free=free, group_size=group_size, train_waits=False, eval_waits=True, last=last) == "eval") == (free >= 1)


def test_the_least_loaded_engine_is_next_and_ties_go_to_the_one_chosen_longest_ago():
    def chosen(**loads):
        return next_engine(loads, loads.__getitem__)

    assert chosen(a=(False, 2, 0), b=(False, 1, 5), c=(False, 1, 4)) == "c"
    assert chosen(a=(False, 0, 0), b=(False, 0, 0)) == "a"
    assert chosen(a=(True, 0, 0), b=(False, 9, 5)) == "b"
    assert chosen(a=(True, 1, 0), b=(True, 0, 5)) == "b"


@given(
    count=st.integers(1, 6),
    steps=st.lists(st.tuples(st.sampled_from(["start", "start", "end", "sync", "synced"]), st.integers(0, 99)), max_size=120),
)
def test_loads_stay_even_among_engines_that_are_not_synced_and_starts_even_them_out(count, steps):
    """However rollouts come and go, one that starts goes to no engine that has more of them than another that it could have gone to."""
    load = {f"e{n}": Load(syncing=False, rollouts=0, taken=0) for n in range(count)}
    for number, (step, choice) in enumerate(steps, 1):
        name = sorted(load)[choice % count]
        if step == "start":
            name = next_engine(load, load.__getitem__)
            open_to_it = [each for each in load.values() if not each.syncing] or list(load.values())
            assert load[name].rollouts == min(each.rollouts for each in open_to_it)
            assert load[name] in open_to_it
            load[name] = load[name]._replace(rollouts=load[name].rollouts + 1, taken=number)
        elif step == "end":
            load[name] = load[name]._replace(rollouts=max(0, load[name].rollouts - 1))
        else:
            load[name] = load[name]._replace(syncing=step == "sync")
    load = {name: each._replace(syncing=False) for name, each in load.items()}
    for number in range(sum(each.rollouts for each in load.values()) * count + count):
        name = next_engine(load, load.__getitem__)
        load[name] = load[name]._replace(rollouts=load[name].rollouts + 1, taken=1000 + number)
    counts = [each.rollouts for each in load.values()]
    assert max(counts) - min(counts) <= 1


@given(every=st.integers(1, 9), jumps=st.lists(st.integers(1, 5), max_size=60))
def test_never_more_than_n_less_one_versions_are_passed_over_by_who_sees_each_of_them(every, jumps):
    version = offered = 0
    for jump in jumps:
        version += jump
        if publication_due(version, offered, every):
            offered = version
        assert version - offered < every
    if all(jump == 1 for jump in jumps):
        assert offered == version - version % every


@given(st.integers(1, 200), st.floats(0.0, 1.0), st.floats(0.01, 1.0), st.floats(1.0, 100.0))
def test_a_backoff_doubles_is_bounded_and_never_shorter_than_half(tries, share, first, longest):
    wait = backoff_seconds(tries, share, first=first, longest=longest)
    whole = min(longest, first * 2.0 ** min(tries - 1, 30))
    assert whole / 2 <= wait <= whole <= longest


def test_P05_seeds_are_the_same_in_every_run_for_ever():
    assert rollout_seed(0, "train", Prompt("prompt-1", 0, {}), 0, 0) == 956022512742992609
    assert rollout_seed(7, "eval", Prompt("prompt-1", 2, {"row": 3}, tries=1), 3, 1) == 1045029348040102723


PROMPTS = st.tuples(st.text("01\x1f", max_size=3), st.integers(0, 3), st.integers(0, 3))
KEYS = st.tuples(st.integers(0, 3), st.sampled_from(["train", "eval"]), PROMPTS, st.integers(0, 20), st.integers(0, 3))


@given(st.lists(KEYS, unique=True, max_size=40))
def test_P05_seeds_are_distinct_for_every_try_member_and_attempt_and_fit_in_63_bits(keys):
    seeds = {
        rollout_seed(seed, purpose, Prompt(name, epoch, {}, tries), member, attempt)
        for seed, purpose, (name, epoch, tries), member, attempt in keys
    }
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


@given(st.integers(1, 5000), st.integers(0, 2**63))
def test_delays_grow_to_ten_seconds_and_never_overflow(attempt, seed):
    longest = min(10.0, 0.1 * 2.0 ** min(attempt - 1, 60))
    assert longest / 2 <= retry_delay_seconds(attempt, seed) <= longest


@given(st.integers(1, 7), st.booleans(), st.lists(st.integers(0, 3), max_size=40))
def test_each_due_version_is_evaluated_once_however_versions_jump(every, at_start, jumps):
    now, section, evaluated = Ledger(version=0), evaluation(every, at_start=at_start), []
    for jump in [0, *jumps]:
        now.version += jump
        for _ in range(2):  # asked twice: due only once
            if eval_due(now, section):
                evaluated.append(now.version)
                now.last_eval = now.version
    periods = [version // every for version in evaluated]
    assert len(set(periods)) == len(periods)
    assert (0 in periods) == at_start
    assert set(periods) - {0} == {version // every for version in _path(jumps)} - {0}


def _path(jumps):
    version = 0
    for jump in jumps:
        version += jump
        yield version


def test_nothing_is_due_before_the_first_publication_or_while_an_evaluation_runs():
    assert not eval_due(Ledger(version=-1), evaluation(at_start=True))
    assert not eval_due(Ledger(version=20, eval_running=10), evaluation())
    assert eval_due(Ledger(version=20, last_eval=10), evaluation())


def test_a_run_that_joins_late_does_not_call_a_later_version_the_start():
    assert not eval_due(Ledger(version=3), evaluation(at_start=True))


def test_a_sync_waits_for_an_evaluation_that_runs_or_is_about_to_start():
    assert sync_must_wait(Ledger(version=12, eval_running=10, last_eval=0), evaluation())
    assert sync_must_wait(Ledger(version=10), evaluation())
    assert not sync_must_wait(Ledger(version=11, last_eval=10), evaluation())
    assert not sync_must_wait(Ledger(version=10), None)


def rewards(*values, trained):
    now = Ledger(next_batch=len(values), trained=trained)
    now.rewards.extend(enumerate(values))
    return now


def test_a_reward_counts_once_its_batch_is_trained():
    goal = FinishWhen(reward_above=0.9, over_batches=2)
    assert not reward_reached(rewards(0.0, 1.0, 1.0, trained=2), goal)
    assert reward_reached(rewards(0.0, 1.0, 1.0, trained=3), goal)


def test_a_reward_must_be_above_its_target_over_all_of_the_batches_asked_for():
    assert not reward_reached(rewards(1.0, trained=1), FinishWhen(reward_above=0.5, over_batches=2))
    assert not reward_reached(rewards(0.5, 0.5, trained=2), FinishWhen(reward_above=0.5, over_batches=2))
    assert not reward_reached(rewards(1.0, 1.0, trained=2), None)


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (Ledger(trained=9, next_batch=10), ""),
        (Ledger(trained=10, next_batch=10), "all 10 steps are trained"),
        (rewards(1.0, 1.0, trained=2), "the mean reward of the last 2 batches is above 0.9"),
        (Ledger(exhausted=True, trained=3, next_batch=3), "the prompts are used up"),
        (Ledger(exhausted=True, trained=2, next_batch=3), ""),
        (Ledger(exhausted=True, ready={0: UNIT}), ""),
        (Ledger(exhausted=True, running={0: UNIT}), ""),
        (Ledger(exhausted=True, waiting={("p", 0): 1}), ""),
    ],
)
def test_a_run_is_complete_when_its_steps_its_reward_or_its_prompts_are(now, why):
    assert run_is_complete(now, 10, FinishWhen(reward_above=0.9, over_batches=2)) == why


def test_without_a_goal_a_run_goes_on_until_its_steps_are_trained():
    assert run_is_complete(rewards(1.0, 1.0, trained=2), 10, None) == ""


def test_a_run_in_which_nothing_trains_is_told_what_became_of_its_groups_and_where_to_look():
    alike = Ledger(alike=7)
    alike.dropped["filtered"] = 9
    assert why_barren(alike) == (
        "groups dropped as filtered 9, groups whose members all scored alike 7: look at the reward: does it ever vary within a group?"
    )
    failing = Ledger(last_loss="timeout: 30 s")
    failing.lost["timeout"] = 3
    assert why_barren(failing) == "attempts lost by timeout 3; the last lost was timeout: 30 s"
