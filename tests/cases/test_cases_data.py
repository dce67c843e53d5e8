"""Fault cases of data order and of the end of the data (P, L01, D05, A10), as whole runs on virtual time."""

from collections import Counter, defaultdict

import pytest
from bound_world import bounded, bounded_world, play

from headway.errors import EmptyBatches
from headway.events import Admitted, BatchFormed, GroupDropped, Ready, SourceExhausted
from headway.settings import RunSection
from headway.sim.distributions import Fixed, Lognormal
from headway.sim.run import simulate
from headway.sim.trainer import TrainerSettings


def of(kind, result):
    return [event for event in result.events if isinstance(event, kind)]


def test_P01_eight_prompts_make_forty_groups_in_five_epochs_each_shuffled_and_every_run_alike():
    section = bounded("mask", 2, groups_per_batch=4, group_size=2)
    runs = [play(bounded_world(prompts=8, seed=3), section, 10) for _ in range(2)]
    admitted = [[(event.prompt_id, event.epoch) for event in of(Admitted, run)] for run in runs]
    assert admitted[0] == admitted[1]
    by_epoch = defaultdict(list)
    for prompt, epoch in admitted[0]:
        by_epoch[epoch].append(prompt)
    whole = [by_epoch[epoch] for epoch in range(5)]
    assert all(sorted(prompts) == sorted(whole[0]) and len(prompts) == 8 for prompts in whole)
    assert len({tuple(prompts) for prompts in whole}) > 1
    assert len(runs[0].batches) == 10


@pytest.mark.parametrize(("prompts", "batches"), [(3, [3]), (4, [4]), (10, [4, 4, 2])])
def test_P03_L01_what_is_left_at_the_end_of_the_data_is_trained(prompts, batches):
    """10 prompts, batches of 4: two whole ones and the rest. A data set smaller than a batch: one step."""
    result = play(bounded_world(prompts=prompts, epochs=1), bounded("mask", 2, groups_per_batch=4, group_size=2), 100)
    assert [len(batch.groups) for batch in result.batches.values()] == batches
    assert result.reason == "the prompts are used up"
    assert len(of(SourceExhausted, result)) == 1


def test_P03_a_run_that_could_train_nothing_does_not_end_well():
    section = bounded("mask", 2, groups_per_batch=4, group_size=2)
    with pytest.raises(EmptyBatches, match="nothing could be trained"):
        simulate(bounded_world(prompts=3, epochs=1, keep=lambda rewards: False), section, RunSection(steps=100))


@pytest.mark.parametrize("mode", ["mask", "wait", "drop"])
def test_L01_a_group_that_goes_stale_at_the_end_of_the_data_does_not_hold_the_end(mode):
    def seconds(prompt, _):
        return Fixed(30.0 if prompt.id == "prompt-7" and not prompt.tries else 0.3)

    section = bounded(mode, 1, groups_per_batch=4, group_size=2)
    result = play(bounded_world(seconds, prompts=10, epochs=1), section, 100)
    trained = {group for batch in result.batches.values() for group in batch.groups}
    prompts = {event.group: event.prompt_id for event in of(Admitted, result)}
    assert len({prompts[group] for group in trained}) == 10


@pytest.mark.parametrize("epochs", [1, 2])
def test_P04_a_number_of_epochs_is_that_many_passes_whatever_run_steps_says(epochs):
    result = play(bounded_world(prompts=12, epochs=epochs), bounded("mask", 2, groups_per_batch=4, group_size=2), 10_000)
    trained = Counter((event.prompt_id, event.epoch) for event in of(Admitted, result))
    assert len(trained) == 12 * epochs
    assert sum(len(batch.groups) for batch in result.batches.values()) == 12 * epochs


def test_D05_groups_complete_beyond_the_next_batch_make_the_batches_after_it():
    """Three batches' worth is complete before the trainer takes the first."""
    trainer = TrainerSettings(seconds=Fixed(1.0), late={0: 100.0})
    section = bounded("mask", 4, groups_per_batch=4, group_size=2)
    result = play(bounded_world(Lognormal(0.5, 0.5), trainer=trainer, prompts=200), section, 10)
    early = [event.group for event in of(Ready, result) if event.time < 100.0]
    assert len(early) >= 3 * 4
    first = [group for event in of(BatchFormed, result)[:3] for group in event.groups]
    assert set(early[:12]) <= {group for batch in result.batches.values() for group in batch.groups}
    assert len(set(first)) == 12
    assert not of(GroupDropped, result)
