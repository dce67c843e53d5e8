import pytest

from headway.adapters.journal.segments import Segments
from headway.errors import StorageError


@pytest.fixture
def opened(tmp_path):
    """Open the segments of a test; every one is closed at its end."""
    alive = []

    def open_segments(last=None, **options):
        alive.append(Segments(tmp_path, last=last, **options))
        return alive[-1]

    yield open_segments
    for segments in alive:
        segments.close()


def test_records_come_back_and_a_second_opening_goes_on_behind_them(opened):
    first = opened()
    references = first.append([b"one", b"", b"three" * 100])
    first.close()
    second = opened(references[-1])
    references += second.append([b"four"])
    assert [second.read(reference) for reference in references] == [b"one", b"", b"three" * 100, b"four"]


def test_a_full_segment_is_followed_by_the_next(opened):
    segments = opened(segment_bytes=100)
    references = segments.append([b"x" * 40] * 5)
    assert [reference.segment for reference in references] == [1, 1, 2, 2, 3]
    assert sorted(path.name for path in segments.path(1).parent.iterdir()) == ["000001.rollouts", "000002.rollouts", "000003.rollouts"]
    assert {segments.read(reference) for reference in references} == {b"x" * 40}


def test_more_records_than_one_system_call_takes(opened):
    segments = opened()
    references = segments.append([str(i).encode() for i in range(1500)])
    assert [segments.read(reference) for reference in references] == [str(i).encode() for i in range(1500)]


def test_a_tail_that_nobody_refers_to_is_cut_away_wherever_it_was_torn(opened):
    segments = opened()
    kept, torn = segments.append([b"kept", b"torn record"])
    segments.close()
    whole = segments.path(1).read_bytes()
    for end in range(torn.offset, len(whole) + 1):
        segments.path(1).write_bytes(whole[:end])
        again = opened(kept)
        (reference,) = again.append([b"next"])
        assert reference.offset == torn.offset
        assert [again.read(kept), again.read(reference)] == [b"kept", b"next"]
        again.close()


def test_a_segment_begun_and_never_referred_to_is_removed(opened):
    segments = opened(segment_bytes=20)
    kept, _ = segments.append([b"kept", b"never referred to"])
    segments.close()
    assert segments.path(2).exists()
    opened(kept).close()
    assert not segments.path(2).exists()


def test_a_file_shorter_than_its_references_is_refused_at_every_byte_and_never_cut_further(opened):
    segments = opened()
    _, last = segments.append([b"first", b"last record"])
    segments.close()
    whole = segments.path(1).read_bytes()
    for end in range(len(whole)):
        segments.path(1).write_bytes(whole[:end])
        with pytest.raises(StorageError, match=r"000001\.rollouts.*(damaged|restore)"):
            opened(last)
        assert segments.path(1).stat().st_size == end


def test_a_missing_segment_is_refused_by_name(opened):
    segments = opened()
    (last,) = segments.append([b"record"])
    segments.close()
    segments.path(1).unlink()
    with pytest.raises(StorageError, match=r"000001\.rollouts: is missing"):
        opened(last)


def test_a_flipped_bit_anywhere_in_a_record_is_refused(opened):
    segments = opened()
    (reference,) = segments.append([b"some payload"])
    whole = bytearray(segments.path(1).read_bytes())
    sequence = range(reference.offset + 8, reference.offset + 16)  # not needed to trust the data
    for at in range(reference.offset, len(whole)):
        if at in sequence:
            continue
        changed = whole.copy()
        changed[at] ^= 0x10
        segments.path(1).write_bytes(changed)
        with pytest.raises(StorageError, match=r"the record at byte 8 .*damaged"):
            segments.read(reference)


def test_a_file_of_another_format_is_refused(opened):
    segments = opened()
    (reference,) = segments.append([b"record"])
    data = segments.path(1).read_bytes()
    segments.path(1).write_bytes(b"HWSEG\0\2\0" + data[8:])
    with pytest.raises(StorageError, match="no segment of version 1"):
        opened(reference)
