"""Every prefix of a real history goes on with all that is durable in it, and accounts for every prompt."""

import itertools

import pytest
from histories_taken_up import FIRST, MEMBERS, journal_of, limits, taken_up, whole

from headway.events import Admitted, BatchFormed, Finished, GroupDropped, RolloutDropped
from headway.flow.take_up import read_history
from headway.rules.deadlines import holds
from headway.settings import RolloutSection, RunSection
from headway.sim.distributions import Fixed, Lognormal
from headway.sim.prompts import ListPrompts
from headway.sim.run import WorldSettings, simulate
from headway.sim.trainer import TrainerSettings
from headway.sim.worker import Fault, RolloutSettings


@pytest.mark.parametrize("mode", ["mask", "wait", "drop"])
@pytest.mark.parametrize("scored_apart", [False, True])
def test_every_prefix_of_a_history_is_taken_up_without_losing_anything_durable(mode, scored_apart):
    rollouts = RolloutSettings(seconds=Lognormal(1.0, 1.0), faults=(Fault("timeout", 0.1),), scored_apart=scored_apart)
    section = RolloutSection(groups_per_batch=2, group_size=MEMBERS, max_concurrent=16, max_staleness=2, steps_ahead=2.0, on_stale=mode)
    world = WorldSettings(rollouts=rollouts, trainer=TrainerSettings(seconds=Fixed(4.0)), prompts=7)
    events = simulate(world, section, RunSection(steps=10), limit_seconds=5e3).events
    assert len(events) > 100
    for length in range(1, len(events)):
        with_loop(_check_prefix(events[:length], mode))


def with_loop(check):
    try:
        check.send(None)
    except StopIteration:
        return
    raise AssertionError("nothing here waits for anything outside")


async def _check_prefix(events, mode):
    history = await read_history(await journal_of(events), lineage=FIRST)
    version, k = history.ledger.trained, history.ledger.next_batch
    durable = _durable(events, version)
    resumption, new = await taken_up(events, version=version, mode=mode, prompts=ListPrompts(7), stored=whole(*range(version, k)))
    kept = {(one.group, one.member) for group in _groups(resumption) for one in group.rollouts}
    dropped = {event.group: event for event in new if isinstance(event, GroupDropped)}
    shipped = {group for event in events if isinstance(event, BatchFormed) and version <= event.k < k for group in event.groups}
    for group, member in durable:
        assert (group, member) in kept or group in shipped or dropped[group].cause == "stale", "something durable is lost"
    assert all(event.requeued for event in dropped.values())
    assert kept <= durable
    ledger = resumption.ledger
    assert sorted(ledger.ready) == sorted(group.admission.group for group in resumption.ready)
    assert sorted(ledger.running) == sorted(one.admission.group for one in (*resumption.unscored, *resumption.continued))
    assert not ledger.interrupted
    assert mode == "mask" or holds(ledger.births, ledger.next_batch, limits(mode), {})
    assert [one for one, _ in resumption.shipped_again] == list(range(version, k))
    _check_accounting(events, new, resumption)
    # taken up again at once, by a process that found all of it written: the same groups, nothing counted twice
    again, _ = await taken_up([*events, *new], version=version, mode=mode, prompts=ListPrompts(7), stored=whole(*range(version, k)))
    assert _by_group(again) == _by_group(resumption)
    assert again.position == resumption.position


def _groups(resumption):
    return [*resumption.ready, *resumption.unscored, *resumption.continued]


def _by_group(resumption):
    return {one.admission.group: (type(one), one.admission, [(r.member, r.reward) for r in one.rollouts]) for one in _groups(resumption)}


def _durable(events, version):
    """Recount: the members that finished, of groups that were not dropped or trained, and that nobody took away since."""
    members = set()
    for event in events:
        match event:
            case Finished():
                members.add((event.group, event.member))
            case RolloutDropped(final=True):
                members.discard((event.group, event.member))
            case GroupDropped():
                members -= {(event.group, member) for member in range(MEMBERS)}
            case BatchFormed() if event.k < version:
                members -= set(itertools.product(event.groups, range(MEMBERS)))
    return members


def _check_accounting(events, new, resumption):
    """Each admission of the newest epoch is consumed, and each prompt is live, waiting, shipped, trained or given up: none is lost."""
    position = resumption.position
    consumed = {event.prompt_id for event in events if isinstance(event, Admitted) and event.epoch == position.epoch}
    assert position.consumed == consumed
    for event in new:
        if isinstance(event, GroupDropped):
            unit = next(one for one in events if isinstance(one, Admitted) and one.group == event.group)
            assert (unit.prompt_id, unit.epoch) in position.waiting
