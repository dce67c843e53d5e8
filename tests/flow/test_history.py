"""The history that a run is taken up again with: what is alive and nothing else, whatever the journal tells of groups that are not."""

import asyncio

import pytest
from doubles import beside

from headway.events import Admitted, BatchAcknowledged, BatchFormed, Finished, GroupDropped, Ingested, Ready, Resumed, RolloutDropped
from headway.flow.history import History, read_history
from headway.protocols import Entry
from headway.rules.ledger import TRAINED_KEPT
from headway.sim.journal import SimJournal


def history(*events):
    found = History("first")
    for event in events:
        found.apply(event)
    return found


def admitted(group, *, members=1):
    return Admitted(1.0, group, f"p{group}", 0, members, 0)


def finished(group, member=0, *, tail=0):
    return Finished(2.0, group, member, 0, 1.0, 5, 4, 0, tail)


def lost(group, member=0, *, final=True, finished=False):
    return RolloutDropped(2.0, group, member, 0, "timeout", "", 4, final, finished)


def ready(group, **more):
    return Ready(3.0, group, zero_advantage=False, **more)


def dropped(group):
    return GroupDropped(3.0, group, "filtered", "", 0)


def trained(k):
    return [admitted(k), finished(k), ready(k), BatchFormed(4.0, k, (k,), 1.0), BatchAcknowledged(5.0, k)]


def test_what_becomes_durable_after_its_group_was_dropped_brings_no_group_back():
    found = history(admitted(0), dropped(0), finished(0), lost(0), ready(0, scores=((0, 1.0),)))
    assert found.groups == {}


def test_an_attempt_that_failed_and_was_tried_again_leaves_its_member_as_it_was():
    found = history(admitted(0, members=2), lost(0, 0, final=False), finished(0, 0), lost(0, 1))
    assert (list(found.groups[0].finished), found.groups[0].lost) == ([0], {1: "timeout"})
    found.apply(lost(0, 0, finished=True))  # a length limit, or a scorer, took it away once it had finished
    assert (found.groups[0].finished, set(found.groups[0].lost)) == ({}, {0, 1})


def test_however_long_a_history_only_groups_that_may_train_yet_are_held():
    found = history(*(event for k in range(TRAINED_KEPT + 20) for event in trained(k)))
    assert set(found.groups) == set(found.ledger.formed) == set(range(20, TRAINED_KEPT + 20))
    assert found.furthest == TRAINED_KEPT + 20


def test_a_batch_from_elsewhere_that_was_trained_long_ago_is_forgotten_with_its_name():
    theirs = [Ingested(1.0, 0, "theirs", "replay", 1, 0), finished(0), ready(0), BatchFormed(4.0, 0, (0,), 1.0), BatchAcknowledged(5.0, 0)]
    later = [event for k in range(1, TRAINED_KEPT + 3) for event in trained(k)]
    found = history(*theirs, *later, Resumed(9.0, TRAINED_KEPT + 3, TRAINED_KEPT + 3, "first"))
    assert 0 not in found.groups
    assert found.replayed == {"theirs": 1}, "it was given, and does not come again"


@pytest.mark.parametrize(("source", "left"), [("replay", {"theirs": 0}), ("external", {})])
def test_a_group_whose_sender_had_no_answer_when_the_process_ended_comes_again(source, left):
    found = history(Ingested(1.0, 0, "theirs", source, 1, 0), finished(0), Resumed(9.0, 0, 0, "first"))
    assert (found.groups, found.ledger.ingested, found.replayed) == ({}, {}, left)


def test_a_version_is_the_newest_lineage_s_that_had_it_and_one_that_went_back_behind_another_replaces_it():
    found = history(*(event for k in range(6) for event in trained(k)))
    for version, lineage in ((5, "second"), (5, "second"), (3, "third")):
        found.apply(Resumed(9.0, version, version, lineage))
    assert [found.maker(version) for version in (0, 3, 4, 9)] == ["first", "first", "third", "third"]
    assert (found.lineage, found.maker(-1)) == ("third", "first"), "what has no version is as old as the run"


async def test_a_long_history_leaves_the_loop_its_turns():
    journal, turns = SimJournal(), []
    await journal.append([Entry(admitted(group)) for group in range(45_000)])

    async def others():
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    async with beside(others()):
        assert (await read_history(journal, lineage="first")).events == 45_000
        assert len(turns) >= 2
