import json
import math
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import StorageError
from headway.events import AnyEvent, Finished, PayloadReference
from headway.formats.events import decode_event, encode_event

KINDS = typing.get_args(AnyEvent)


def is_finite(value):
    if isinstance(value, (tuple, dict)):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


@given(st.one_of([st.from_type(kind) for kind in KINDS]))
def test_every_event_comes_back_as_written_or_is_not_written(event):
    if not all(is_finite(getattr(event, name)) for name in event.__struct_fields__):
        with pytest.raises(StorageError, match="not finite"):
            encode_event(event)
        return
    line = encode_event(event)
    assert decode_event(line) == event
    assert json.loads(line)["event"] == event.__struct_config__.tag
    assert b"\n" not in line


def test_tags_name_events_one_to_one():
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("line", [b"", b"{}", b'{"event": "unheard_of", "time": 1}', b'{"event": "finished", "time": 1}', b"\xff"])
def test_what_is_no_event_is_refused_by_name(line):
    with pytest.raises(StorageError, match="journal event cannot be read"):
        decode_event(line)


def test_an_event_cut_anywhere_is_refused():
    line = encode_event(Finished(1.0, 1, 2, 1, 0.5, 10, 8, 3, 4, PayloadReference(1, 8, 100, 77)))
    for cut in range(len(line)):
        with pytest.raises(StorageError):
            decode_event(line[:cut])
