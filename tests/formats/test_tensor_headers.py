"""Headers of checkpoints: what they hold is told without reading a tensor, and what is not whole is refused by the file's name."""

from pathlib import Path

import numpy as np
import pytest
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
