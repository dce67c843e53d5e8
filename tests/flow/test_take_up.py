"""Taking a run up again: what it records, in which order, before anything starts, and what the components begin with."""

import pytest
from histories_taken_up import FIRST, MEMBERS, journal_of, limits, taken_up, whole

from headway.errors import ConfigError, RunFailed
from headway.events import (
    Admitted,
    BatchAcknowledged,
    BatchFormed,
    ConfigChanged,
    Continued,
    Ended,
    Finished,
    GroupDropped,
    Ingested,
    PromptDropped,
    Published,
    Ready,
    Resumed,
    RolloutDropped,
    SourceExhausted,
)
from headway.flow.take_up import read_history
from headway.protocols import Entry
from headway.rules.deadlines import holds
from headway.sim.prompts import ListPrompts
from headway.types import PayloadReference, Prompt


def admitted(group, prompt=None, *, birth=0, epoch=0):
    return Admitted(1.0, group, f"prompt-{group if prompt is None else prompt}", epoch, MEMBERS, birth)


def finished(group, member, *, tail=0, reward=None, **more):
    reference = PayloadReference(1, group * 10 + member, 5, 7)
    reward = float(member) if reward is None else reward
    return Finished(3.0, group, member, 0, reward, 9, 7, 0, tail, reference, environment="e", turns=2, seconds=2.0, size=5, **more)


def complete(group, **more):
    return [admitted(group, birth=more.get("birth", 0)), *(finished(group, n, tail=more.get("tail", 0)) for n in range(2)), ready(group)]


def ready(group, **more):
    return Ready(4.0, group, zero_advantage=False, **more)


# ---- what is recorded, and in which order --------------------------------------------------------------------------------------------


async def test_the_events_come_in_their_order_and_only_what_changed_is_told():
    events = [
        Published(0.0, 0, ()),
        *complete(0),
        *complete(1),
        BatchFormed(5.0, 0, (0, 1), 0.5),
        admitted(2),
        finished(2, 1),
        admitted(3),
    ]
    times = {1: 77.0}
    resumption, new = await taken_up(events, version=1, trained_at=times.get, changed=["run.steps"])
    assert new == [
        BatchAcknowledged(77.0, 0),
        Resumed(1000.0, 1, 1, FIRST),
        Continued(1000.0, 2),
        GroupDropped(1000.0, 3, "interrupted", "in flight when the process ended", 0, requeued=True),
        ConfigChanged(1000.0, ("run.steps",)),
    ]
    assert resumption.position.waiting == {("prompt-3", 0): 1}
    _, new = await taken_up(events, version=1)
    assert new[0] == BatchAcknowledged(1000.0, 0)
    assert not any(isinstance(event, ConfigChanged) for event in new)


async def test_batches_that_lie_there_whole_are_shipped_again_with_their_rows_and_others_are_dissolved():
    events = [
        *(event for group in range(6) for event in complete(group)),
        *(BatchFormed(5.0, k, (2 * k, 2 * k + 1), 0.5) for k in range(3)),
    ]
    resumption, new = await taken_up(events, stored=whole(0, 2))
    assert resumption.shipped_again == [(0, {"batch": 0})]
    assert new == [Resumed(1000.0, 0, 1, FIRST)]
    assert sorted(one.admission.group for one in resumption.ready) == [2, 3, 4, 5]
    assert resumption.ledger.next_batch == 1


async def test_where_training_goes_back_what_newer_weights_wrote_is_dropped_and_the_rest_stays():
    events = [Published(0.0, 0, ()), *complete(0), *complete(1), BatchFormed(5.0, 0, (0, 1), 0.5), BatchAcknowledged(6.0, 0)]
    events += [Published(7.0, 1, ()), *complete(2, birth=0, tail=1), *complete(3), admitted(4, birth=1), finished(4, 0, tail=1)]
    resumption, new = await taken_up(events, lineages={FIRST: None, "second": "first-0"}, lineage="second", stored=whole(0))
    assert sorted(one.admission.group for one in resumption.ready) == [0, 1, 3]
    assert {event.group: (event.cause, event.requeued) for event in new if isinstance(event, GroupDropped)} == {
        2: ("lineage", True),
        4: ("lineage", True),
    }
    assert resumption.shipped_again == [], "a batch of the line that ended is formed anew"
    assert (resumption.ledger.trained, resumption.ledger.next_batch) == (0, 0)


async def test_stamps_keep_the_lineage_in_force_when_they_were_written_through_any_number_of_resumes():
    events = [Published(0.0, 0, ()), *complete(0), *complete(1), BatchFormed(5.0, 0, (0, 1), 0.5), BatchAcknowledged(6.0, 0)]
    events += [Published(7.0, 1, ()), *complete(2, birth=0, tail=1)]
    lineages = {FIRST: None, "second": "first-0"}
    events.append(Resumed(8.0, 0, 0, "second"))  # and the process died before it had said what is dropped
    resumption, new = await taken_up(events, lineages=lineages, lineage="second")
    assert [event.group for event in new if isinstance(event, GroupDropped)] == [2]
    events += new
    events += [*complete(5), BatchFormed(9.0, 0, (0, 1), 0.5), BatchAcknowledged(9.0, 0), Published(9.0, 1, ()), *complete(6, tail=1)]
    resumption, new = await taken_up(events, version=1, lineages=lineages, lineage="second")
    assert sorted(one.admission.group for one in resumption.ready) == [5, 6]
    assert not any(isinstance(event, GroupDropped) for event in new)


@pytest.mark.parametrize(("version", "says"), [(2, "knows of 1 batches"), (7, "restore run.state_directory")])
async def test_weights_that_the_journal_knows_nothing_of_are_refused(version, says):
    events = [*complete(0), *complete(1), BatchFormed(5.0, 0, (0, 1), 0.5)]
    with pytest.raises(RunFailed, match=says):
        await taken_up(events, version=version)


async def test_a_run_goes_back_no_further_than_its_rollouts_are_kept():
    events = []
    for k in range(5):
        events += [*complete(2 * k), *complete(2 * k + 1), BatchFormed(5.0, k, (2 * k, 2 * k + 1), 0.5), BatchAcknowledged(6.0, k)]
    resumption, new = await taken_up(events, version=2, lineage="second", lineages={"second": "first-2"}, keeps=3)
    assert sorted(one.admission.group for one in resumption.ready) == [4, 5, 6, 7, 8, 9]
    with pytest.raises(RunFailed, match=r"version 1, and 5 batches were trained: a run can go back by 3 at most"):  # in two steps neither
        await taken_up([*events, *new], version=1, lineage="third", lineages={"second": "first-2", "third": "second-1"}, keeps=3)
    with pytest.raises(RunFailed, match="go back by 2 at most"):
        await taken_up(events, version=2, lineage="second", lineages={"second": "first-2"}, keeps=2)


# ---- what the components begin with --------------------------------------------------------------------------------------------------


async def test_groups_come_as_stubs_with_what_their_events_tell_and_advantages_computed_anew():
    events = [admitted(0), finished(0, 1, finish="length"), RolloutDropped(3.0, 0, 0, 2, "timeout", "", 0, final=True), ready(0)]
    events += [admitted(1), finished(1, 0, tail=0), finished(1, 1), ready(1, scores=((0, 4.0), (1, 2.0)), score_parts=((0, {"a": 1.0}),))]
    resumption, _ = await taken_up(events)
    alone, scored = sorted(resumption.ready, key=lambda one: one.admission.group)
    assert (alone.advantages, scored.advantages) == ((0.0,), (1.0, -1.0))
    (stub,) = alone.rollouts
    assert (stub.finish, stub.turns, stub.started, stub.finished, stub.tokens, stub.sampled_tokens) == ("length", 2, 1.0, 3.0, 9, 7)
    assert (stub.payload, stub.reference, stub.environment, stub.prompt_id) == (b"", PayloadReference(1, 1, 5, 7), "e", "prompt-0")
    assert [(one.reward, one.rewards) for one in scored.rollouts] == [(4.0, {"a": 1.0}), (2.0, {})]
    assert alone.admission.prompt == Prompt("prompt-0", 0, {"number": 0})


async def test_a_group_that_has_all_its_members_and_no_ready_is_scored_and_sunk_and_others_go_on():
    events = [
        *(admitted(group) for group in range(3)),
        finished(0, 0),
        RolloutDropped(3.0, 0, 1, 2, "timeout", "", 0, final=True),
        finished(1, 0),
        finished(1, 1),
        RolloutDropped(3.0, 1, 1, 0, "bad_reward", "", 7, final=True, finished=True),
        finished(2, 1),
        RolloutDropped(3.0, 2, 0, 1, "engine_error", "", 0, final=False),
    ]
    resumption, _ = await taken_up(events)
    assert [(one.admission.group, [r.member for r in one.rollouts], one.lost) for one in resumption.unscored] == [
        (0, [0], ("timeout",)),
        (1, [0], ("bad_reward",)),
    ]
    assert [(one.admission.group, [r.member for r in one.rollouts], one.lost) for one in resumption.continued] == [(2, [1], {})]


async def test_tries_are_counted_through_a_resume():
    events = [admitted(0), GroupDropped(2.0, 0, "stale", "", 0, requeued=True), admitted(1, prompt=0), finished(1, 0)]
    resumption, _ = await taken_up(events)
    assert resumption.continued[0].admission.prompt.tries == 1


async def test_what_the_source_no_longer_has_is_given_up_and_what_is_complete_trains_all_the_same():
    events = [
        *complete(30),
        *complete(31),
        admitted(32),
        finished(32, 0),
        admitted(33),
        admitted(34),
        finished(34, 0),
        finished(34, 1),
        admitted(35),
        GroupDropped(4.0, 35, "stale", "", 0, requeued=True),
    ]
    resumption, new = await taken_up(events, prompts=ListPrompts(32))
    assert sorted(one.admission.group for one in resumption.ready) == [30, 31]
    assert [one.admission.group for one in resumption.unscored] == [34], "it has its rewards: nothing of its prompt is needed"
    assert resumption.continued == []
    assert [(event.prompt_id, event.cause) for event in new if isinstance(event, PromptDropped)] == [
        ("prompt-32", "missing"),
        ("prompt-35", "missing"),
        ("prompt-33", "missing"),
    ]
    assert resumption.position.waiting == {}
    assert resumption.position.consumed == {f"prompt-{number}" for number in range(30, 36)}


async def test_the_position_is_that_of_the_newest_epoch_whatever_is_tried_again_in_older_ones():
    events = [admitted(0, epoch=0), admitted(1, prompt=5, epoch=1), GroupDropped(2.0, 0, "stale", "", 0, requeued=True)]
    events += [admitted(2, prompt=0, epoch=0), admitted(3, prompt=6, epoch=1), SourceExhausted(3.0)]
    resumption, _ = await taken_up(events)
    assert (resumption.position.epoch, resumption.position.consumed) == (1, {"prompt-5", "prompt-6"})
    assert resumption.position.waiting == {("prompt-0", 0): 2, ("prompt-5", 1): 1, ("prompt-6", 1): 1}
    assert not resumption.ledger.exhausted


async def test_replayed_groups_keep_their_places_and_are_counted_by_name_once_they_are_durable():
    def ingested(group, name, k, source="replay"):
        return Ingested(1.0, group, name, source, MEMBERS, k)

    events = [ingested(0, "a", 0), finished(0, 0), finished(0, 1), ready(0)]
    events += [ingested(1, "a", 1), finished(1, 0), ingested(2, "b", 1), finished(2, 0), finished(2, 1), ready(2)]
    events += [ingested(3, "c", 1, "external"), finished(3, 0), finished(3, 1), ready(3), ingested(4, "d", 1)]
    events += [GroupDropped(2.0, 4, "score_error", "", 0)]
    resumption, _ = await taken_up(events)
    assert resumption.replayed == {"a": 1, "b": 1, "d": 1}, "the second of a's was not durable: it comes again"
    assert [(one.admission.group, one.admission.birth, one.rollouts[0].source) for one in resumption.ready] == [
        (0, -1, "replay"),
        (2, -1, "replay"),
        (3, -1, "external"),
    ]


async def test_a_group_from_elsewhere_keeps_its_place_in_a_batch_that_is_formed_again_and_live_ones_have_what_is_left():
    theirs = [Ingested(1.0, 0, "theirs", "replay", MEMBERS, 0), finished(0, 0), finished(0, 1), ready(0)]
    live = [event for group in range(1, 5) for event in complete(group)]
    events = [*theirs, *live, BatchFormed(5.0, 0, (0, 1), 0.5)]
    within = limits("wait", max_staleness=1, replayed_groups=1)
    resumption, new = await taken_up(events, within=within)  # batch 0 does not lie there whole
    assert sorted(one.admission.group for one in resumption.ready) == [0, 1, 2, 3]
    assert resumption.ledger.promised == {0: 1}
    assert [(event.group, event.cause, event.requeued) for event in new if isinstance(event, GroupDropped)] == [(4, "stale", True)]
    assert holds(resumption.ledger.births, 0, within, resumption.ledger.promised)


async def test_advantages_that_are_no_numbers_end_the_resume_as_they_end_a_run():
    with pytest.raises(ConfigError, match=r"rollout\.advantage"):
        await taken_up(complete(0), advantages=lambda rewards: rewards[:1])


async def test_a_history_says_how_the_last_process_ended():
    journal = await journal_of([Published(0.0, 0, ()), Ended(1.0, 0, "all steps are trained")])
    assert (await read_history(journal, lineage=FIRST)).ended == 0
    await journal.append([Entry(Resumed(2.0, 0, 0, FIRST))])
    assert (await read_history(journal, lineage=FIRST)).ended is None
