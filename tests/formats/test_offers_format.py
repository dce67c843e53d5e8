"""Offers in a manifest: what is well formed comes through with absolute paths, everything else is left out and said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import StorageError
from headway.formats.offers import DeltaOffer, MemoryOffer, read_offers
from headway.formats.shared_memory import clear, create, lies_there, memory_of

RUN = Path("/runs/guess")
DELTA = {"base": 16, "directory": "deltas/00000017", "bytes": 5}
MEMORY = {"directory": "/dev/shm/headway-ab12/00000017"}


def test_offers_come_with_absolute_paths_and_ways_that_nobody_knows_are_left_out():
    offers, problem = read_offers({"delta": DELTA, "memory": MEMORY, "nccl": {"rank": 0}}, run=RUN, version=17)
    assert offers == {"delta": DeltaOffer(16, "/runs/guess/deltas/00000017", 5), "memory": MemoryOffer(MEMORY["directory"])}
    assert problem == ""


def test_a_manifest_without_offers_has_none():
    assert read_offers(None, run=RUN, version=17) == ({}, "")


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ([], "must be an object"),
        ({"delta": 3}, '"delta"'),
        ({"delta": {}}, '"delta".*base'),
        ({"delta": DELTA | {"base": 17}}, "must be older"),
        ({"delta": DELTA | {"base": -1}}, '"delta"'),
        ({"delta": DELTA | {"base": True}}, '"delta"'),
        ({"delta": DELTA | {"bytes": -1}}, '"delta"'),
        ({"delta": DELTA | {"directory": "/etc"}}, "must lie in the run directory"),
        ({"delta": DELTA | {"directory": "deltas/../../other"}}, "must lie in the run directory"),
        ({"delta": DELTA | {"directory": ""}}, "must lie in the run directory"),
        ({"delta": DELTA | {"directory": "a\0b"}}, "must lie in the run directory"),
        ({"memory": {"directory": "deltas/00000017"}}, "shared memory"),
        ({"memory": {"directory": "/dev/shm/headway-ab12/../x"}}, "shared memory"),
        ({"memory": {"directory": "/dev/shm/headway-ab12"}}, "shared memory"),
        ({"memory": {"directory": "/dev/shm/other/00000017"}}, "shared memory"),
        ({"memory": {"directory": ["/dev/shm/headway-ab12/00000017"]}}, '"memory"'),
    ],
)
def test_an_offer_of_the_wrong_shape_is_left_out_and_named(said, says):
    offers, problem = read_offers(said, run=RUN, version=17)
    assert offers == {}
    assert re.search(says, problem), problem


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["delta", "memory", "base", "directory", "bytes"]), inner),
    max_leaves=10,
)


@given(ANYTHING)
def test_whatever_a_manifest_says_nothing_is_raised_and_nothing_leads_elsewhere(said):
    offers, _ = read_offers(said, run=RUN, version=17)
    for way, offer in offers.items():
        assert offer.directory.startswith(str(RUN) + "/") if way == "delta" else lies_there(offer.directory)


# ------------------------------------------------------------------------------------------------------------------------ shared memory


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", "ab 12", "ab-12", "\u0661"])
def test_only_a_plain_id_names_a_place_in_memory(run_id):
    with pytest.raises(StorageError, match="letters and digits"):
        memory_of(run_id)


@pytest.fixture
def memory(tmp_path):
    return tmp_path / memory_of("ab12").name


def test_a_runs_memory_is_for_its_user_alone_and_goes_with_all_that_is_in_it(memory):
    create(memory)
    create(memory)
    assert memory.stat().st_mode & 0o777 == 0o700
    (memory / "00000001").mkdir()
    (memory / "00000001" / "model.safetensors").write_bytes(b"x")
    clear(memory)
    clear(memory)
    assert not memory.exists()


@pytest.mark.parametrize("what", ["file", "link", "open to all"])
def test_what_somebody_else_has_put_there_is_not_used(memory, tmp_path, what):
    match what:
        case "file":
            memory.write_bytes(b"")
        case "link":
            (tmp_path / "elsewhere").mkdir()
            memory.symlink_to(tmp_path / "elsewhere")
        case "open to all":
            memory.mkdir()
            memory.chmod(0o777)
    with pytest.raises(StorageError, match="in the way"):
        create(memory)
