"""Whole runs on virtual time: memory that is scarce changes nothing, prompts that never work are given up, nothing goes round for ever."""

from collections import Counter

import pytest

from headway.errors import EmptyBatches, HeadwayError
from headway.events import Admitted, Ended, Finished, GroupDropped, PromptDropped, Ready
from headway.rules.quarantine import PATIENCE
from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Fixed, Lognormal, mixture
from headway.sim.journal import SimJournal
from headway.sim.run import WorldSettings, simulate
from headway.sim.trainer import TrainerSettings
from headway.sim.worker import Fault, RolloutSettings
from headway.sim.world import Kill


def section(**more):
    return RolloutSection(**{"groups_per_batch": 2, "group_size": 2, "max_concurrent": 16, "max_staleness": 2, "max_attempts": 1, **more})


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def played(budget, *, scored_apart, kills):
    rollouts = RolloutSettings(seconds=Lognormal(1.0, 1.0), payload=True, scored_apart=scored_apart)
    world = WorldSettings(rollouts=rollouts, trainer=TrainerSettings(seconds=Fixed(5.0)))
    return simulate(world, section(max_held_bytes=budget), RunSection(steps=8), kills=kills, limit_seconds=5e3)


@pytest.mark.parametrize("scored_apart", [False, True])
@pytest.mark.parametrize("kills", [[], [Kill(at=17.0)], [Kill(at=9.0), Kill(at=21.0)]])
def test_where_payloads_lie_changes_nothing_of_a_run(kills, scored_apart):
    ample = played(2**30, scored_apart=scored_apart, kills=kills)
    for budget in (0, 3000):
        scarce = played(budget, scored_apart=scored_apart, kills=kills)
        assert scarce.events == ample.events
        assert scarce.batches == ample.batches
    assert len(ample.batches) == 8
    assert sum(event.size for event in of(Finished, ample.events)) > 10 * 3000


def test_an_environment_that_always_fails_ends_the_run_and_does_not_go_round():
    world = WorldSettings(rollouts=RolloutSettings(faults=(Fault("environment_error", 1.0),)), prompts=1000)
    run = RunSection(steps=10, max_empty_batches=5, max_consecutive_failures=10**6)
    journal = SimJournal()
    with pytest.raises(EmptyBatches, match="10 groups in a row had nothing to train on"):
        simulate(world, section(), run, journal=journal, limit_seconds=1e4)
    assert of(PromptDropped, journal.events) == [], "no prompt is blamed for a service that is down"


def test_with_few_prompts_that_always_fail_all_are_given_up_and_the_run_says_that_nothing_could_be_trained():
    world = WorldSettings(rollouts=RolloutSettings(faults=(Fault("environment_error", 1.0),)), prompts=3, epochs=1)
    run = RunSection(steps=10, max_empty_batches=10**6, max_consecutive_failures=10**6)
    journal = SimJournal()
    with pytest.raises(EmptyBatches, match="the prompts are used up and nothing could be trained: groups dropped as incomplete"):
        simulate(world, section(), run, journal=journal, limit_seconds=1e4)
    assert sorted(event.prompt_id for event in of(PromptDropped, journal.events)) == [f"prompt-{n}" for n in range(3)]
    assert len(of(GroupDropped, journal.events)) <= 3 * 3 * PATIENCE


def poisoned(prompt, member, chance):
    return None if prompt.fields["number"] == 3 else chance  # None without a scorer: a reward that is no number


@pytest.mark.parametrize("kills", [[], [Kill(at=6.0)], [Kill(commit=20), Kill(commit=20)]])
def test_a_prompt_that_never_works_is_quarantined_and_all_others_train_in_every_epoch(kills):
    rollouts = RolloutSettings(seconds=Fixed(1.0), reward=poisoned)
    world = WorldSettings(rollouts=rollouts, trainer=TrainerSettings(seconds=Fixed(1.0)), prompts=10, epochs=5)
    result = simulate(world, section(max_prompt_failures=2), RunSection(steps=1000), kills=kills, limit_seconds=1e4)
    tried = [event for event in of(Admitted, result.events) if event.prompt_id == "prompt-3"]
    assert [event.epoch for event in tried] == [0, 1], (
        "a reward that is no number is not tried again at once; quarantine holds in any epoch"
    )
    (gone,) = of(PromptDropped, result.events)
    assert (gone.prompt_id, gone.epoch, gone.cause, gone.failures) == ("prompt-3", 1, "quarantined", 2)
    assert list(result.ledger.quarantined) == ["prompt-3"]
    prompts = {event.group: (event.prompt_id, event.epoch) for event in of(Admitted, result.events)}
    trained = Counter(prompts[group] for batch in result.batches.values() for group in batch.groups)
    assert trained == Counter({(f"prompt-{n}", epoch): 1 for n in range(10) if n != 3 for epoch in range(5)})


@pytest.mark.parametrize("seed", range(5))
def test_a_flaky_environment_loses_no_prompt(seed):
    """What infrastructure loses is tried again until it works, across crashes: every prompt of the epoch is trained or has its reason."""
    rollouts = RolloutSettings(seconds=Lognormal(1.0, 1.0), faults=(Fault("environment_error", 0.15),))
    world = WorldSettings(rollouts=rollouts, trainer=TrainerSettings(seconds=Fixed(3.0)), prompts=60, epochs=1, seed=seed)
    kills = [Kill(at=11.0 + seed), Kill(at=30.0 + seed)]
    result = simulate(world, section(max_prompt_failures=4), RunSection(steps=1000, seed=seed), kills=kills, limit_seconds=1e4)
    prompts = {event.group: event.prompt_id for event in of(Admitted, result.events)}
    trained = Counter(prompts[group] for batch in result.batches.values() for group in batch.groups)
    given_up = {event.prompt_id for event in of(PromptDropped, result.events)}
    unbounded = {
        prompts[e.group] for e in of(GroupDropped, result.events) if e.cause not in {"incomplete", "interrupted"} and not e.requeued
    }
    assert set(trained.values()) == {1}
    assert trained.keys() | given_up | unbounded == {f"prompt-{n}" for n in range(60)}
    assert not trained.keys() & given_up
    assert any(event.requeued for event in of(GroupDropped, result.events) if event.cause == "incomplete")
    assert of(Ready, result.events)


def test_a_journal_that_loses_a_payload_ends_the_run_with_the_name_of_the_record():
    class Forgetful(SimJournal):
        async def read(self, reference):
            return await super().read(type(reference)(1, -reference.offset, 0, 0))

    world = WorldSettings(rollouts=RolloutSettings(payload=True))
    with pytest.raises(HeadwayError, match=r"the record of group \d+, member \d+ cannot be read again: no rollout is kept"):
        simulate(world, section(max_held_bytes=0), RunSection(steps=3), journal=Forgetful())


@pytest.mark.parametrize("scored_apart", [False, True])
def test_an_interrupted_run_leaves_what_does_not_finish_in_time_in_flight_and_a_finished_one_drops_it(scored_apart):
    slow = mixture((0.8, Fixed(1.0)), (0.2, Fixed(1e5)))
    score = Fixed(1e5) if scored_apart else Fixed(0.0)
    rollouts = RolloutSettings(seconds=slow, scored_apart=scored_apart, score_seconds=score)
    ends = {}
    for code in (0, 143):
        run = RunSection(steps=1000, drain_timeout_seconds=60)
        result = simulate(WorldSettings(rollouts=rollouts), section(timeout_seconds=0), run, drain_at=10.0, drain_code=code)
        cut = [drop.requeued for drop in of(GroupDropped, result.events) if drop.time > 10.0]
        ends[code] = (bool(result.ledger.running), result.ledger.dropped["cancelled"] == len(cut), set(cut))
        assert of(Ended, result.events)[0].code == code
    assert ends == {0: (False, True, {True}), 143: (True, True, set())}
