"""Deltas: base and delta together are the version, bit for bit; whatever else is refused by name."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from headway.errors import StorageError
from headway.formats.delta import NAME, TENSORS, read_delta, refuse_other_base, tensor_hashes, verified_tensors, write_delta

ATTENTION = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight")
NAMES = (*ATTENTION, "model.layers.0.mlp.experts.0.up.weight", "model.layers.0.mlp.experts.11.up.weight", "model.norm.weight", "lm_head")
LABELS: dict[str, Any] = {"lineage": "ab12", "base_version": 16, "version": 17}


def checkpoint(directory, **tensors):
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / TENSORS)
    return directory


def random_tensors(seed):
    chance = np.random.default_rng(seed)
    return {name: chance.normal(size=(3, 4)).astype(np.float32) for name in NAMES}


@pytest.fixture
def base(tmp_path):
    return checkpoint(tmp_path / "16", **random_tensors(0))


def changed(tmp_path, *names):
    return checkpoint(tmp_path / "17", **(random_tensors(0) | {name: random_tensors(1)[name] for name in names}))


def delta_of(directory):
    """Return what its delta.json says: there is one."""
    delta = read_delta(directory)
    assert delta is not None
    return delta


def applied(base, out):
    """Return what an engine has that takes the delta: its tensors over the base's, once everything is proven."""
    delta = delta_of(out)
    carried = verified_tensors(out, delta)
    refuse_other_base(delta, tensor_hashes(base), carried)
    return load_file(base / TENSORS) | load_file(out / TENSORS)


@settings(max_examples=30, deadline=None)
@given(st.sets(st.sampled_from(NAMES)))
def test_base_and_delta_are_the_version_bit_for_bit(tmp_path_factory, names):
    tmp_path = tmp_path_factory.mktemp("delta")
    base = checkpoint(tmp_path / "16", **random_tensors(0))
    version = changed(tmp_path, *names)
    written = write_delta(base, version, tmp_path / "delta", **LABELS, smaller=False)
    got, wanted = applied(base, tmp_path / "delta"), load_file(version / TENSORS)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].tobytes() == tensor.tobytes(), name
    assert written.hashes == tensor_hashes(version)
    assert written.whole_bytes == len(NAMES) * 48


@pytest.mark.parametrize(
    ("names", "carried"),
    [
        ([], set()),
        (["lm_head"], {"lm_head"}),
        (["model.norm.weight"], {"model.norm.weight"}),
        ([ATTENTION[0]], set(ATTENTION)),
        (["model.layers.0.mlp.experts.11.up.weight"], {name for name in NAMES if "experts" in name}),
    ],
    ids=["nothing", "the head", "a norm", "attention", "experts"],
)
def test_a_module_of_which_a_tensor_has_changed_is_carried_whole_and_nothing_else_is(tmp_path, base, names, carried):
    written = write_delta(base, changed(tmp_path, *names), tmp_path / "delta", **LABELS)
    assert load_file(tmp_path / "delta" / TENSORS).keys() == carried
    assert written.bytes == 48 * len(carried)


def test_hashes_of_the_base_do_as_well_as_its_directory(tmp_path, base):
    version = changed(tmp_path, "lm_head")
    write_delta(base, version, tmp_path / "a", **LABELS)
    write_delta(tensor_hashes(base), version, tmp_path / "b", **LABELS)
    assert (tmp_path / "a" / TENSORS).read_bytes() == (tmp_path / "b" / TENSORS).read_bytes()
    assert read_delta(tmp_path / "a") == read_delta(tmp_path / "b")


def test_what_would_save_nothing_is_not_written_unless_it_is_asked_for(tmp_path, base):
    version = changed(tmp_path, *NAMES)
    written = write_delta(base, version, tmp_path / "delta", **LABELS)
    assert written.bytes == written.whole_bytes
    assert not (tmp_path / "delta").exists()
    write_delta(base, version, tmp_path / "delta", **LABELS, smaller=False)
    assert load_file(tmp_path / "delta" / TENSORS).keys() == set(NAMES)


def test_a_tensor_that_changed_its_shape_alone_has_changed_for_the_engine_that_checks_headers(tmp_path, base):
    version = checkpoint(tmp_path / "17", **(random_tensors(0) | {"lm_head": random_tensors(0)["lm_head"].reshape(4, 3)}))
    write_delta(base, version, tmp_path / "delta", **LABELS)
    assert load_file(tmp_path / "delta" / TENSORS).keys() == set()  # its bytes are the same: who loads compares shapes first


def test_a_tensor_cannot_be_taken_away(tmp_path, base):
    tensors = random_tensors(1)
    del tensors["lm_head"]
    with pytest.raises(StorageError, match="lacks lm_head, which its base has"):
        write_delta(base, checkpoint(tmp_path / "17", **tensors), tmp_path / "delta", **LABELS)
    assert not (tmp_path / "delta").exists()


def test_a_base_that_differs_in_one_tensor_is_refused_by_its_name(tmp_path, base):
    write_delta(base, changed(tmp_path, "lm_head"), tmp_path / "delta", **LABELS)
    other = checkpoint(tmp_path / "15", **(random_tensors(0) | {"model.norm.weight": random_tensors(2)["model.norm.weight"]}))
    with pytest.raises(StorageError, match=r"from other weights than these: model\.norm\.weight differs"):
        applied(other, tmp_path / "delta")


def test_a_base_with_a_tensor_that_the_version_has_not_is_refused(tmp_path, base):
    write_delta(base, changed(tmp_path, "lm_head"), tmp_path / "delta", **LABELS)
    with pytest.raises(StorageError, match="it knows no bias"):
        applied(checkpoint(tmp_path / "15", **random_tensors(0), bias=np.zeros(1)), tmp_path / "delta")


def test_a_directory_without_delta_json_is_no_delta(base):
    assert read_delta(base) is None


@pytest.fixture
def delta(tmp_path, base):
    write_delta(base, changed(tmp_path, "lm_head"), tmp_path / "delta", **LABELS)
    return tmp_path / "delta"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is damaged"),
        (b"[]", "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (b'{"format_version": 2, "lineage": "ab12", "base": 1, "version": 2, "tensors": {}}', "install a newer headway"),
        (b'{"format_version": 1, "lineage": "ab12", "base": -1, "version": 2, "tensors": {}}', "is damaged"),
        (b'{"format_version": 1, "lineage": "ab12", "base": 1, "version": 2, "tensors": {"x": "ab"}}', "is damaged"),
        (b'{"format_version": 1, "lineage": "ab12", "base": 1, "version": 2, "tensors": {"x": 1e999}}', "is damaged"),
        (b'{"format_version": 1, "base": 1, "version": 2, "tensors": {}}', "is damaged"),
    ],
)
def test_a_delta_json_that_is_none_is_an_error_by_its_name(delta, content, says):
    (delta / NAME).write_bytes(content)
    with pytest.raises(StorageError, match=rf"delta\.json.*{says}"):
        read_delta(delta)


@pytest.mark.parametrize("how", ["pipe", "endless", "directory", "large"])
def test_a_delta_json_that_cannot_be_read_through_is_an_error_and_not_waited_for(delta, how):
    (delta / NAME).unlink()
    match how:
        case "pipe":
            os.mkfifo(delta / NAME)
        case "endless":
            (delta / NAME).symlink_to("/dev/zero")
        case "directory":
            (delta / NAME).mkdir()
        case "large":
            with (delta / NAME).open("wb") as file:
                file.truncate(1 << 40)
    with pytest.raises(StorageError, match=r"delta\.json"):
        read_delta(delta)


def test_a_bit_that_is_not_as_written_is_found_in_the_tensors(delta):
    data = bytearray((delta / TENSORS).read_bytes())
    data[-1] ^= 1
    (delta / TENSORS).write_bytes(data)
    with pytest.raises(StorageError, match=r"lm_head is not what delta\.json says"):
        verified_tensors(delta, delta_of(delta))


def test_a_tensor_that_delta_json_does_not_name_is_refused(delta):
    content = json.loads((delta / NAME).read_bytes())
    del content["tensors"]["lm_head"]
    (delta / NAME).write_text(json.dumps(content))
    with pytest.raises(StorageError, match="holds lm_head, which"):
        verified_tensors(delta, delta_of(delta))


def test_a_version_that_is_there_is_not_written_over_and_nothing_half_is_left(tmp_path, delta, base):
    with pytest.raises(StorageError, match="exists already"):
        write_delta(base, tmp_path / "17", delta, **LABELS)
    assert not list(tmp_path.glob(".tmp-*"))
