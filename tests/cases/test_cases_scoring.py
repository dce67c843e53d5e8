"""G05 and D11 on virtual time: groups that are dropped while they are being scored leave no score, no row and no place behind."""

from bound_world import bounded, bounded_world, play

from headway.events import Finished, GroupDropped, Ready, RolloutDropped
from headway.sim.distributions import Fixed, Lognormal
from headway.sim.trainer import TrainerSettings


def of(kind, result):
    return [event for event in result.events if isinstance(event, kind)]


def test_G05_groups_that_are_dropped_while_they_are_scored_are_no_wrong_answers_and_their_prompts_are_tried_again():
    """A scorer that takes from none to five versions; the bound is two: who is late is dropped by `on_stale = "drop"`, half scored."""
    rollouts = {"scored_apart": True, "score_seconds": Lognormal(1.2, 1.0)}
    world = bounded_world(Fixed(0.3), rollouts=rollouts, trainer=TrainerSettings(seconds=Fixed(1.0)), prompts=5000)
    result = play(world, bounded("drop", 2, groups_per_batch=8, group_size=4), 60)
    finished = {}
    for event in of(Finished, result):
        finished[event.group] = finished.get(event.group, 0) + 1
    ready = {event.group for event in of(Ready, result)}
    cut = [event for event in of(GroupDropped, result) if finished.get(event.group, 0) == 4 and event.group not in ready]
    assert len(cut) >= 30
    assert {event.cause for event in cut} == {"stale"}
    gone = {event.group for event in cut}
    assert not [event for event in of(RolloutDropped, result) if event.group in gone]
    assert not gone & {group for batch in result.batches.values() for group in batch.groups}
    assert all(batch.rollouts == 8 * 4 for batch in result.batches.values())
    assert sum(event.requeued for event in cut) > len(cut) // 2
