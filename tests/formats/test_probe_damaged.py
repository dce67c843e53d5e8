"""A probe.npz that cannot be read is refused in one line, whatever is wrong with it: the run goes on without its check, or says so."""

import io
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import StorageError
from headway.formats.probe import NAME, Probe, read_probe, write_probe

PROBE = Probe(tuple(range(8)), np.log(np.full(50, 1 / 50, np.float32)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return a directory that has a sound probe; whoever damages it puts it back."""
    path = tmp_path_factory.mktemp("weights")
    write_probe(path, PROBE)
    return path


@pytest.fixture(scope="module")
def members(directory):
    with zipfile.ZipFile(directory / NAME) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(members, compression=zipfile.ZIP_STORED):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return data.getvalue()


def read(directory, data):
    (directory / NAME).write_bytes(data)
    return read_probe(directory)


def refused(directory, data):
    with pytest.raises(StorageError, match=rf"{NAME}: .*the trainer must write it as docs/reference/formats\.md says") as found:
        read(directory, data)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 700


def replaced(members, name, old, new):
    assert old in members[name]
    return packed({**members, name: members[name].replace(old, new)})


def test_what_is_packed_otherwise_is_read_all_the_same(directory, members):
    assert read(directory, packed(members, zipfile.ZIP_DEFLATED)).token_ids == PROBE.token_ids


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"'shape': (8,)", b"'shape': (8,("),  # numpy tokenizes it: TokenError
        (b"'<i4'", b"',i4'"),  # numpy parses it: SyntaxError
        (b"\x93NUMPY", b"\x00NUMPY"),  # no array: its bytes
        (b"'<i4'", b"'|O4'"),
        (b"'shape': (8,)", b"'shape': (9,)"),
    ],
)
def test_an_array_whose_header_is_damaged(directory, members, old, new):
    refused(directory, replaced(members, "token_ids.npy", old, new))


def test_an_archive_that_is_damaged_or_lacks_an_array(directory, members):
    squeezed = bytearray(packed(members, zipfile.ZIP_DEFLATED))
    first = squeezed.index(b"token_ids.npy") + len(b"token_ids.npy")
    squeezed[first : first + 40] = b"\xff" * 40  # zlib.error
    refused(directory, bytes(squeezed))
    refused(directory, packed(members)[:-30])
    refused(directory, packed({"token_ids.npy": members["token_ids.npy"]}))
    refused(directory, b"")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_however_it_is_damaged_it_is_a_probe_or_refused(directory, members, data):
    compression = data.draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
    if data.draw(st.booleans()):
        damaged = bytearray(packed(members, compression))
        for _ in range(data.draw(st.integers(1, 3))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    else:  # with a checksum that agrees
        changed = {name: bytearray(content) for name, content in members.items()}
        victim = changed[data.draw(st.sampled_from(sorted(changed)))]
        for _ in range(data.draw(st.integers(1, 4))):
            victim[data.draw(st.integers(0, 127))] = data.draw(st.sampled_from(b"()[]{}',: <fiuO4\n\t\\#\"0\x00~-+"))
        damaged = packed(changed, compression)
    try:
        found = read(directory, bytes(damaged))
    except StorageError as error:
        assert "\n" not in str(error)  # noqa: PT017  either end is right
    else:
        assert len(found.logprobs) > max(found.token_ids)
