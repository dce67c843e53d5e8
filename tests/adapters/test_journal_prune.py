"""What is pruned from a journal is what nobody needs, and a journal that was pruned is whole."""

import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_rollouts import finished, small_rollout

from headway.adapters.journal.sqlite import SqliteJournal
from headway.errors import StorageError


@pytest.fixture
async def opened(tmp_path):
    """Open the journal of a test, a record or two to a segment; every one is closed at its end."""
    alive = []

    def open_journal():
        alive.append(SqliteJournal(tmp_path / "state", run_id="run-1", segment_bytes=300))
        return alive[-1]

    yield open_journal
    for journal in alive:
        await journal.close()


def segments(tmp_path):
    return {int(path.stem): path for path in (tmp_path / "state" / "segments").iterdir()}


async def test_rollouts_of_needed_groups_stay_and_segments_without_any_go(opened, tmp_path):
    journal = opened()
    events = list(await journal.append([finished(small_rollout(group)) for group in range(6)]))
    assert len(segments(tmp_path)) == 6
    await journal.prune({1, 4})
    assert sorted(segments(tmp_path)) == [2, 5, 6]  # 6: group 5 is newer than all that are needed, and it is being written
    await journal.prune({4, 9})
    assert sorted(segments(tmp_path)) == [5, 6]
    assert await journal.read(events[4].reference) == small_rollout(4)
    with pytest.raises(StorageError, match=r"000002\.rollouts: cannot be read"):
        await journal.read(events[1].reference)
    assert list(journal.replay()) == events  # events stay


async def test_a_pruned_journal_is_opened_again_and_a_segment_that_is_missing_otherwise_is_damage(opened, tmp_path):
    journal = opened()
    events = list(await journal.append([finished(small_rollout(group)) for group in range(6)]))
    await journal.prune({3, 4, 9})
    await journal.close()
    again = opened()
    assert list(again.replay()) == events
    assert await again.read(events[3].reference) == small_rollout(3)
    await again.prune({4, 9})
    events += await again.append([finished(small_rollout(9))])
    await again.close()
    assert sorted(segments(tmp_path)) == [5, 6, 7]
    segments(tmp_path)[5].unlink()
    with pytest.raises(StorageError, match=r"000005\.rollouts: is missing, but the journal refers to it"):
        opened()


async def test_a_process_killed_while_it_prunes_is_finished_with_at_the_next_opening(opened, tmp_path):
    journal = opened()
    await journal.append([finished(small_rollout(group)) for group in range(4)])
    await journal.close()
    with sqlite3.connect(tmp_path / "state" / "events.sqlite") as connection:
        connection.execute("INSERT INTO pruned VALUES (1), (2)")  # noted, and then it was killed
    connection.close()
    segments(tmp_path)[2].unlink()
    opened()
    assert sorted(segments(tmp_path)) == [3, 4]


async def test_nothing_is_pruned_where_nothing_is_known_to_be_needed(opened, tmp_path):
    journal = opened()
    await journal.append([finished(small_rollout(group)) for group in range(4)])
    await journal.prune(())
    assert len(segments(tmp_path)) == 4


@settings(max_examples=25)
@given(st.lists(st.one_of(st.integers(1, 4), st.frozensets(st.integers(0, 40), max_size=12), st.none()), max_size=12))
async def test_whatever_is_asked_for_in_whatever_order_what_is_needed_can_be_read(tmp_path_factory, steps):
    """A number: so many groups finish; a set: all others may go; None: the process ends, and the next one opens the journal."""
    directory = tmp_path_factory.mktemp("state")
    journal = SqliteJournal(directory, run_id="run-1", segment_bytes=700)
    events, gone = [], set()
    for step in steps:
        if isinstance(step, int):
            groups = range(len(events), len(events) + step)
            events += await journal.append([finished(small_rollout(group)) for group in groups])
        elif step is None:
            await journal.close()
            journal = SqliteJournal(directory, run_id="run-1", segment_bytes=700)
        else:
            await journal.prune(step)
            gone |= set(range(min(len(events), max(step, default=0) + 1))) - step
    assert list(journal.replay()) == events
    for group, event in enumerate(events):
        if group not in gone:
            assert await journal.read(event.reference) == small_rollout(group)
    await journal.close()
