"""Fault cases of runs that are taken up again, whole runs on virtual time: no burst, no lost prompt, no lost place in the data."""

import asyncio
import random
from collections import Counter

import pytest
from bound_world import LATENCIES, MODES, bounded, bounded_world
from crash_worlds import WITHOUT_END, limits
from lives import check_lives

from headway.events import (
    Admitted,
    BatchAcknowledged,
    BatchFormed,
    Finished,
    GroupDropped,
    Published,
    Ready,
    Resumed,
)
from headway.protocols import Entry
from headway.sim.distributions import Fixed
from headway.sim.journal import SimJournal
from headway.sim.run import simulate
from headway.sim.trainer import TrainerSettings
from headway.sim.world import Kill
from headway.types import Rollout

B, K = 8, 2
AT_ADMISSION = [mode for mode, (enforce, _) in MODES.items() if enforce == "admission"]


def played(world, section, *kills, steps=WITHOUT_END, prompts=(), **more):
    result = simulate(world, section, limits(steps), kills=kills, limit_seconds=1e6, **more)
    return result, check_lives(result, section, steps, prompts=prompts)


def steady(late=None, **world):
    """A trainer that takes a second a batch, but for some, and rollouts of half a second."""
    return bounded_world(Fixed(0.5), trainer=TrainerSettings(seconds=Fixed(1.0), late=late or {}), **world)


# ------------------------------------------------------------------------------------------------------------------------------------- A01


def admitted_before_the_next_version(result):
    """How many groups a run that was taken up has started before it had a newer version, less those of them that were dropped."""
    [start] = [index for index, event in enumerate(result.events) if isinstance(event, Resumed)]
    version = result.events[start].version
    end = next(i for i, event in enumerate(result.events) if i > start and isinstance(event, Published) and event.version > version)
    started = {event.group for event in result.events[start:end] if isinstance(event, Admitted)}
    dropped = {event.group for event in result.events[start:end] if isinstance(event, GroupDropped)}
    return version, len(started - dropped)


@pytest.mark.parametrize("ready", [0, 8, 23])
@pytest.mark.parametrize("version", [1, 50, 500])
@pytest.mark.parametrize("mode", AT_ADMISSION)
def test_A01_a_resume_at_any_version_admits_no_burst(mode, version, ready):
    """B = 8, K = 2, and the trainer stands still: before version v + 1 no more are live than K + 1 batches take, whatever was restored."""
    journal, _ = history(version, [(f"ready-{number}", version) for number in range(ready)])
    section = bounded(mode, K, groups_per_batch=B)
    world = steady({version: 300.0}, version=version, prompts=1000)
    result = simulate(world, section, limits(version + 6), journal=journal, limit_seconds=1e5)
    resumed_at, admitted = admitted_before_the_next_version(result)
    assert (resumed_at, admitted) == (version, (K + 1) * B - ready)
    assert result.max_staleness <= K
    assert max(result.batches) == version + 5


@pytest.mark.parametrize("moment", [0.1, 100.0], ids=["with nothing left", "with what was ready"])
@pytest.mark.parametrize("version", [0, 20])
@pytest.mark.parametrize("mode", AT_ADMISSION)
def test_A01_nor_does_one_after_a_kill(mode, version, moment):
    section = bounded(mode, K, groups_per_batch=B)
    killed = Kill(at=0.5 + 1.1 * version + moment, trainer_dies=True)
    result, books = played(steady({version: 300.0}), section, killed, steps=version + 6)
    _, admitted = admitted_before_the_next_version(result)
    assert admitted <= (K + 1) * B
    assert books.resumes == 1
    assert result.max_staleness <= K


# ------------------------------------------------------------------------------------------------------------------------------------- A08


def history(version, groups):
    """A journal of `version` trained batches of one group each, and complete groups beside: (prompt, birth)."""
    entries, number, prompts = [], 0, {}

    def complete(prompt, birth):
        nonlocal number
        spans = {"spans": [(0, birth)]}
        rollout = Rollout(number, 0, 0, prompt, "sim", 0.5, {}, "stop", 1, 0.0, 0.0, "engine-0", spans, 1, 26, 10, birth, birth, b"")
        entries.append(Entry(Admitted(0.0, number, prompt, 0, 1, birth)))
        entries.append(Entry(Finished(0.0, number, 0, 0, 0.5, 26, 10, birth, birth, environment="sim", turns=1), rollout))
        entries.append(Entry(Ready(0.0, number, zero_advantage=False)))
        prompts[number] = prompt
        number += 1
        return number - 1

    aside = Counter()
    for k in range(version + 1):
        entries.append(Entry(Published(0.0, k, ("engine-0",))))
        for prompt, birth in groups:
            if birth == k:
                aside[complete(prompt, birth)] += 1
        if k < version:
            entries.append(Entry(BatchFormed(0.0, k, (complete(f"prompt-{100 + k}", k),), 0.5)))
            entries.append(Entry(BatchAcknowledged(0.0, k)))
    journal = SimJournal()
    asyncio.run(journal.append(entries))
    return journal, {prompts[group]: group for group in aside}


@pytest.mark.parametrize("mode", MODES)
def test_A08_over_age_groups_of_a_snapshot_are_evicted_counted_and_generated_anew_and_the_step_ships(mode):
    """3 over-age and 5 fresh groups, B = 8."""
    version = 6
    old = [(f"prompt-{number}", version - K - 1) for number in range(3)]
    fresh = [(f"prompt-{number}", version) for number in range(3, 8)]
    journal, groups = history(version, old + fresh)
    section = bounded(mode, K, groups_per_batch=B, max_concurrent=64)
    result = simulate(steady(version=version, prompts=200), section, limits(version + 3), journal=journal, limit_seconds=1e4)
    assert list(result.batches) == [version, version + 1, version + 2]
    evicted = [event for event in result.events if isinstance(event, GroupDropped)]
    assert [(event.group, event.cause, event.requeued) for event in evicted] == [(groups[prompt], "stale", True) for prompt, _ in old]
    assert result.ledger.dropped == {"stale": 3}
    first = {prompt: event for event in result.events if isinstance(event, Admitted) and (prompt := event.prompt_id)}
    assert {groups[prompt] for prompt, _ in fresh} <= set(result.batches[version].groups)
    assert {first[prompt].group for prompt, _ in old} <= set(result.batches[version].groups), "regenerated before anything new"


# ------------------------------------------------------------------------------------------------------------------------------------- B01


@pytest.mark.parametrize("seed", range(8))
def test_B01_five_kills_lose_no_prompt_of_400_and_train_none_twice(seed):
    draw = random.Random(seed)
    section = bounded([*MODES][seed % len(MODES)], 2, groups_per_batch=8, group_size=2, max_concurrent=64)
    at, kills = 0.0, []
    for _ in range(5):
        at += draw.uniform(1.0, 12.0)
        kills.append(Kill(at=at, trainer_dies=draw.random() < 0.5, engines_die=draw.random() < 0.5, weights_lost=draw.choice([0, 0, 1])))
    every = [(f"prompt-{number}", 0) for number in range(400)]
    world = bounded_world(LATENCIES["lognormal 1"], prompts=400, epochs=1, seed=seed, commit_seconds=0.02)
    result, books = played(world, section, *kills, prompts=every)
    assert result.lives == 6
    trained = Counter(books.prompts[group] for batch in result.world.trained.values() for group in batch.groups)
    given_up = {books.prompts[group] for group, cause in books.dropped.items() if cause == "stale"} - trained.keys()
    assert set(trained.values()) == {1}
    assert len(trained) + len(given_up) == 400
    assert not given_up or section.on_stale == "drop" or section.enforce == "ship", "where what is stale is tried a bounded number of times"


# ------------------------------------------------------------------------------------------------------------------------------------- B03


def sequence(result):
    """The prompts of each step, in order."""
    prompts = {event.group: (event.prompt_id, event.epoch) for event in result.events if isinstance(event, Admitted)}
    return [[prompts[group] for group in result.world.trained[k].groups] for k in sorted(result.world.trained)]


@pytest.mark.parametrize("source", [{"prompts": 1000, "epochs": 1}, {"prompts": 30, "epochs": 0}], ids=["a list", "without end"])
@pytest.mark.parametrize("moment", [0.1, 0.55, 0.9, 1.4], ids=lambda part: f"{part} s after version 10")
def test_B03_a_resumed_run_goes_on_with_the_prompts_that_an_unbroken_one_has(source, moment):
    """20 steps straight, and 10 then 10, on-policy: the prompts of steps 11 to 20 are the same, in the same order."""
    section = bounded("mask", 0, groups_per_batch=8, max_concurrent=8)
    straight, _ = played(steady(**source), section, steps=20)
    at = next(event.time for event in straight.events if isinstance(event, Published) and event.version == 10) + moment
    broken, _ = played(steady(**source), section, Kill(at=at, trainer_dies=True), steps=20)
    assert broken.lives == 2
    assert sequence(broken)[:10] == sequence(straight)[:10]
    assert sequence(broken)[10:] == sequence(straight)[10:]


# ------------------------------------------------------------------------------------------------------------------------------------- P04


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kills", [0, 1, 3])
def test_P04_two_epochs_are_two_passes_with_and_without_a_resume_in_the_second(mode, kills):
    section = bounded(mode, 4, groups_per_batch=4, max_concurrent=16)
    every = [(f"prompt-{number}", epoch) for number in range(40) for epoch in range(2)]
    times = [Kill(at=13.3 + 2 * number) for number in range(kills)]
    result, books = played(steady(prompts=40, epochs=2), section, *times, prompts=every)
    if kills:
        resumed = next(event.time for event in result.events if isinstance(event, Resumed))
        assert any(event.epoch == 1 for event in result.events if isinstance(event, Admitted) and event.time < resumed)
    assert result.reason == "the prompts are used up"
    trained = Counter(books.prompts[group] for batch in result.world.trained.values() for group in batch.groups)
    given_up = {
        prompt: 1 for prompt in every if prompt in books.ended_well
    }  # reported, where what is stale is tried a bounded number of times
    assert trained | given_up == dict.fromkeys(every, 1)
    assert not given_up or mode == "drop at ship"
