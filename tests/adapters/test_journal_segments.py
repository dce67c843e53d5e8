from pathlib import Path

import pytest

from headway.adapters.journal.segments import SegmentIndex, Segments
from headway.errors import StorageError


def index_of(*stored):
    """The index of (group, reference) pairs, in their order."""
    index = SegmentIndex()
    for group, reference in stored:
        index.add(group, reference)
    return index


@pytest.fixture
def opened(tmp_path):
    """Open the segments of a test behind the records stored; every one is closed at its end."""
    alive = []

    def open_segments(*stored, **options):
        alive.append(Segments(tmp_path, index=index_of(*stored), **options))
        return alive[-1]

    yield open_segments
    for segments in alive:
        segments.close()


def append(segments, *records):
    """Append records of groups 0, 1, ..., and return the pairs (group, reference)."""
    return list(enumerate(segments.append(list(enumerate(records)))))


def files(segments):
    """The numbers of the segment files there are."""
    return sorted(int(path.stem) for path in segments.path(1).parent.iterdir())


def open_files():
    """How many files this process has open (Linux)."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_records_come_back_and_a_second_opening_goes_on_behind_them(opened):
    first = opened()
    stored = append(first, b"one", b"", b"three" * 100)
    first.close()
    second = opened(*stored)
    stored += append(second, b"four")
    assert [second.read(reference) for _, reference in stored] == [b"one", b"", b"three" * 100, b"four"]


def test_a_full_segment_is_followed_by_the_next(opened):
    segments = opened(segment_bytes=100)
    stored = append(segments, *[b"x" * 40] * 5)
    assert [reference.segment for _, reference in stored] == [1, 1, 2, 2, 3]
    assert files(segments) == [1, 2, 3]
    assert {segments.read(reference) for _, reference in stored} == {b"x" * 40}


def test_however_many_segments_are_read_few_are_open(opened):
    segments = opened(segment_bytes=1)
    stored = append(segments, *(str(i).encode() for i in range(100)))
    before = open_files()
    for _ in range(2):
        assert [segments.read(reference) for _, reference in stored] == [str(i).encode() for i in range(100)]
    assert open_files() - before <= 16
    segments.close()
    assert open_files() < before


def test_more_records_than_one_system_call_takes(opened):
    segments = opened()
    stored = append(segments, *(str(i).encode() for i in range(1500)))
    assert [segments.read(reference) for _, reference in stored] == [str(i).encode() for i in range(1500)]


def test_a_tail_that_nobody_refers_to_is_cut_away_wherever_it_was_torn(opened):
    segments = opened()
    kept, (_, torn) = append(segments, b"kept", b"torn record")
    segments.close()
    whole = segments.path(1).read_bytes()
    for end in range(torn.offset, len(whole) + 1):
        segments.path(1).write_bytes(whole[:end])
        again = opened(kept)
        ((_, reference),) = append(again, b"next")
        assert reference.offset == torn.offset
        assert [again.read(kept[1]), again.read(reference)] == [b"kept", b"next"]
        again.close()


def test_a_segment_begun_and_never_referred_to_is_removed(opened):
    segments = opened(segment_bytes=20)
    kept, _ = append(segments, b"kept", b"never referred to")
    segments.close()
    assert segments.path(2).exists()
    opened(kept).close()
    assert not segments.path(2).exists()


def test_a_file_shorter_than_its_references_is_refused_at_every_byte_and_never_cut_further(opened):
    segments = opened()
    stored = append(segments, b"first", b"last record")
    segments.close()
    whole = segments.path(1).read_bytes()
    for end in range(len(whole)):
        segments.path(1).write_bytes(whole[:end])
        with pytest.raises(StorageError, match=r"000001\.rollouts.*damaged.*restore"):
            opened(*stored)
        assert segments.path(1).stat().st_size == end


def test_an_older_segment_that_is_cut_short_is_refused_too(opened):
    segments = opened(segment_bytes=20)
    stored = append(segments, b"in the first segment", b"in the second")
    segments.close()
    with segments.path(1).open("r+b") as file:
        file.truncate(stored[0][1].length)
    with pytest.raises(StorageError, match=r"000001\.rollouts: is damaged: \d+ bytes, the journal refers to \d+"):
        opened(*stored)


def test_a_missing_segment_is_refused_by_name(opened):
    segments = opened(segment_bytes=20)
    stored = append(segments, b"in the first segment", b"in the second")
    segments.close()
    segments.path(1).unlink()
    with pytest.raises(StorageError, match=r"000001\.rollouts: is missing"):
        opened(*stored)


def test_a_flipped_bit_anywhere_in_a_record_is_refused(opened):
    segments = opened()
    ((_, reference),) = append(segments, b"some payload")
    whole = bytearray(segments.path(1).read_bytes())
    for at in range(reference.offset, len(whole)):
        changed = whole.copy()
        changed[at] ^= 0x10
        segments.path(1).write_bytes(changed)
        with pytest.raises(StorageError, match=r"the record at byte 8 .*damaged"):
            segments.read(reference)


def test_a_record_that_lies_in_the_place_of_another_is_refused(opened):
    segments = opened()
    (_, first), (_, second) = append(segments, b"alike", b"alike")
    whole = bytearray(segments.path(1).read_bytes())
    whole[first.offset : second.offset] = whole[second.offset :]
    segments.path(1).write_bytes(whole)
    with pytest.raises(StorageError, match="the record at byte 8 does not match its checksum"):
        segments.read(first)


def test_a_file_of_another_format_is_refused(opened):
    segments = opened()
    stored = append(segments, b"record")
    data = segments.path(1).read_bytes()
    segments.path(1).write_bytes(b"HWSEG\0\7\0" + data[8:])
    with pytest.raises(StorageError, match="no segment of version 2"):
        opened(*stored)


def test_segments_of_groups_that_nobody_needs_can_go_and_the_current_one_never(opened):
    segments = opened(segment_bytes=20)
    append(segments, *[b"a record that fills its segment"] * 5)
    assert segments.unneeded({1, 4}) == [1, 3, 4]
    assert segments.unneeded({9}) == [1, 2, 3, 4]
    assert segments.unneeded(()) == []  # every group may have been admitted after the question


def test_a_segment_with_a_group_admitted_after_the_question_stays(opened):
    segments = opened(segment_bytes=20)
    append(segments, *[b"a record that fills its segment"] * 5)
    assert segments.unneeded([2]) == [1, 2]


def test_a_removed_segment_is_gone_and_its_records_are_refused(opened):
    segments = opened(segment_bytes=20)
    stored = append(segments, *[b"a record that fills its segment"] * 3)
    segments.read(stored[0][1])
    segments.remove([1])
    assert files(segments) == [2, 3]
    with pytest.raises(StorageError, match=r"000001\.rollouts: cannot be read: No such file"):
        segments.read(stored[0][1])
    assert segments.read(stored[1][1]) == b"a record that fills its segment"
    assert segments.unneeded({2}) == [2]


def test_what_was_to_be_removed_when_the_process_ended_is_removed_at_the_opening(opened):
    segments = opened(segment_bytes=20)
    stored = append(segments, *[b"a record that fills its segment"] * 3)
    segments.close()
    again = opened(*stored, pruned={1})
    assert files(again) == [2, 3]
    again.close()
    assert opened(*stored, pruned={1}).unneeded({2}) == [2]
