"""Headers of checkpoints: what they hold is told without reading a tensor, and what is not whole is refused by the file's name."""

import json
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from headway.errors import StorageError
from headway.formats.tensor_headers import TensorEntry, read_tensors


def shard(directory: Path, name: str, **tensors) -> Path:
    file = directory / f"{name}.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    return file


def test_the_tensors_of_all_files_are_told_by_name_type_and_shape(tmp_path):
    one = shard(tmp_path, "model-00001", a=np.zeros((2, 3), np.float32))
    two = shard(tmp_path, "model-00002", b=np.zeros(4, np.float16), c=np.zeros((), np.int64))
    assert read_tensors(tmp_path) == {
        "a": TensorEntry(one, "F32", (2, 3)),
        "b": TensorEntry(two, "F16", (4,)),
        "c": TensorEntry(two, "I64", ()),
    }


def test_a_tensor_in_two_files_is_refused_with_both_their_names(tmp_path):
    shard(tmp_path, "a", x=np.zeros(1))
    shard(tmp_path, "b", x=np.zeros(1))
    with pytest.raises(StorageError, match=r"b\.safetensors holds x, which a\.safetensors holds too"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda whole: whole[:-1], "header promises"),
        (lambda whole: whole + b" ", "header promises"),
        (lambda whole: whole[:20], "truncated"),
        (lambda whole: b"", "truncated"),
        (lambda whole: b"\x02" + bytes(7) + b"[]", "no readable header"),
        (lambda whole: b"\x0a" + bytes(7) + b'{"x": null', "no readable header"),
        (lambda whole: b"\x0b" + bytes(7) + b'{"x": null}', "no readable header"),
    ],
)
def test_a_file_that_is_not_whole_is_refused_by_its_name(tmp_path, spoil, says):
    file = shard(tmp_path, "model", x=np.zeros(3))
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(StorageError, match=rf"model\.safetensors .*{says}"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("there", [True, False])
def test_a_directory_without_weights_is_no_checkpoint(tmp_path, there):
    with pytest.raises(StorageError, match="holds no" if there else "is no directory"):
        read_tensors(tmp_path if there else tmp_path / "absent")


def written(file: Path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from(["F64", "F32", "BF16", "F16", "I64", "I32", "U8", "BOOL", "F8_E4M3"]),
    off=st.integers(-8, 8),
)
def test_a_tensor_has_the_bytes_that_its_shape_and_type_take_and_no_others(tmp_path_factory, shape, dtype, off):
    file = tmp_path_factory.mktemp("header") / "model.safetensors"
    right = prod(shape) * {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2}.get(dtype, 1)
    size = max(0, right + off)
    written(file, {"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}, bytes(size))
    if size == right:
        assert read_tensors(file.parent)["x"] == TensorEntry(file, dtype, tuple(shape))
    else:
        with pytest.raises(StorageError, match=rf"x is {dtype} .* and has {size} bytes: write it again"):
            read_tensors(file.parent)


@pytest.mark.parametrize(
    ("places", "says"),
    [([(0, 8), (4, 12)], "begins at byte"), ([(0, 8), (12, 20)], "begins at byte"), ([(4, 12), (12, 20)], "begins at byte")],
)
def test_tensors_that_overlap_or_leave_gaps_are_refused(tmp_path, places, says):
    entry = {"dtype": "F32", "shape": [2]}
    written(
        tmp_path / "m.safetensors",
        {f"t{i}": {**entry, "data_offsets": list(place)} for i, place in enumerate(places)},
        bytes(places[-1][1]),
    )
    with pytest.raises(StorageError, match=says):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    "entry", [{"shape": [-1]}, {"shape": [1.5]}, {"shape": ["2"]}, {"data_offsets": [0.0, 8]}, {"data_offsets": [8, 0]}]
)
def test_a_header_whose_numbers_are_none_is_no_header(tmp_path, entry):
    written(tmp_path / "m.safetensors", {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}}, bytes(8))
    with pytest.raises(StorageError, match="no readable header"):
        read_tensors(tmp_path)


def test_a_header_that_is_nested_without_end_is_no_header(tmp_path):
    header = b"[" * 200_000
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(StorageError, match="no readable header"):
        read_tensors(tmp_path)
