"""Deltas: what has changed between two versions of a checkpoint, exact by hash.

    <directory>/model.safetensors   the tensors of every module of which one has changed
    <directory>/delta.json          {format_version, lineage, base, version, tensors: {name: SHA-256 of its bytes, for ALL of the version}}

Who has the base, and hashes of its tensors that agree with `tensors` for all that the file leaves out, has exactly the version once the
file's tensors are in their places. Whole modules, since servers fuse the tensors of one (query, key and value; the experts of a layer): a
vLLM that is given a part of a fused weight answers 200 and leaves the rest uninitialised. Any trainer can write one, without torch: two
checkpoints on disk are all that it takes. Hashing and checking run in threads, by the piece: a file that is cut meanwhile is an error and
not the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from headway.errors import StorageError
from headway.formats.bounded import brief, decode_json, open_regular, read_bounded
from headway.formats.files import storage_errors, strict_json
from headway.formats.manifest import publish, staging
from headway.formats.tensor_headers import TensorEntry, bytes_in, read_tensors

FORMAT_VERSION = 1
NAME = "delta.json"
TENSORS = "model.safetensors"
MAX_BYTES = 64 * 1024**2  # half a million tensors

_PIECE_BYTES = 1 << 20
_THREADS = 4  # hashing releases the interpreter lock
_MODULE = re.compile(r"^(?:.*?\.)?\d+\.[^.]+(?=\.)")  # a layer's attention, MLP or norm: model.layers.0.self_attn


class NoDelta(StorageError):
    """Two checkpoints between which there is no delta."""


Hashes = Mapping[str, str]
"""Tensor name to SHA-256 of its bytes, in hexadecimal."""


class Delta(msgspec.Struct, frozen=True):
    """What a delta says of itself (`delta.json`): with `<lineage>-<base>`, its file's tensors make `<lineage>-<version>`."""

    format_version: int
    lineage: str
    base: Annotated[int, Meta(ge=0)]
    version: Annotated[int, Meta(ge=0)]
    tensors: dict[str, Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]]


@dataclass(frozen=True, slots=True)
class Written:
    """A delta as written: `bytes` of its tensors, of those of the whole version, and the version's hashes for the next one."""

    bytes: int
    whole_bytes: int
    hashes: Hashes


def tensor_hashes(directory: Path) -> dict[str, str]:
    """Return the hash of every tensor of a checkpoint. Raises StorageError."""
    return _hashes(read_tensors(directory))


def write_delta(
    base: Hashes | Path, checkpoint: Path, out: Path, *, lineage: str, base_version: int, version: int, smaller: bool = True
) -> Written:
    """Make `out` appear, whole: what turns the base (its directory, or its hashes) into the version that lies in `checkpoint`.

    `smaller`: nothing is written where it would have no fewer bytes than the checkpoint, and `bytes` of the answer says so.

    Raises:
        NoDelta: a tensor of the base is gone, and no delta can take one away.
        StorageError: a checkpoint is damaged, or the disk is full.
    """
    had = tensor_hashes(base) if isinstance(base, Path) else base
    entries = read_tensors(checkpoint)
    hashes = _hashes(entries)
    if gone := sorted(had.keys() - hashes.keys()):
        raise NoDelta(f"{checkpoint} lacks {gone[0]}, which its base has: no delta leads there")
    modules = {_module(name) for name in entries if had.get(name) != hashes[name]}
    changed = {name: entry for name, entry in entries.items() if _module(name) in modules}
    written = Written(bytes_in(changed.values()), bytes_in(entries.values()), hashes)
    if smaller and written.bytes >= written.whole_bytes:
        return written
    with storage_errors(f"{out}: cannot be written"):
        out.parent.mkdir(parents=True, exist_ok=True)
    temporary = staging(out)
    try:
        with storage_errors(f"{temporary}: cannot be written"):
            _write_tensors(changed, temporary / TENSORS)
            (temporary / NAME).write_bytes(strict_json(Delta(FORMAT_VERSION, lineage, base_version, version, hashes)))
        publish(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return written


def read_delta(directory: Path) -> Delta | None:
    """Return what the delta in a directory says of itself; None: it is none. Raises StorageError: damaged, or from a newer headway."""
    path = directory / NAME
    try:
        with storage_errors(f"{path}: cannot be read"):
            if not path.exists():
                return None
            content = read_bounded(path, MAX_BYTES)
        delta: Delta = decode_json(content, Delta)
    except msgspec.MsgspecError as error:
        raise StorageError(f"{path}: is damaged: {brief(error)}: load the complete checkpoint") from error
    if delta.format_version != FORMAT_VERSION:
        raise StorageError(f"{path}: format version {delta.format_version}, this headway reads {FORMAT_VERSION}: install a newer headway")
    return delta


def verified_tensors(directory: Path, delta: Delta) -> dict[str, TensorEntry]:
    """Return the tensors that a delta carries, each with the hash that it states. Raises StorageError."""
    entries = read_tensors(directory)
    if strange := sorted(entries.keys() - delta.tensors.keys()):
        raise StorageError(f"{directory} holds {strange[0]}, which its {NAME} does not name: load the complete checkpoint")
    for name, found in _hashes(entries).items():
        if found != delta.tensors[name]:
            raise StorageError(f"{directory}: {name} is not what {NAME} says (SHA-256): load the complete checkpoint")
    return entries


def refuse_other_base(delta: Delta, base: Hashes, carried: Mapping[str, object]) -> None:
    """Raise StorageError, naming one, unless all tensors that are not `carried` are the base's, by hash, and no other was there."""
    for name, wanted in delta.tensors.items():
        if name not in carried and base.get(name) != wanted:
            raise StorageError(f"the delta to version {delta.version} is from other weights than these: {name} differs")
    if gone := sorted(base.keys() - delta.tensors.keys()):
        raise StorageError(f"the delta to version {delta.version} is from other weights than these: it knows no {gone[0]}")


def _module(name: str) -> str:
    """Return the module that servers load as one: within a layer, what follows the layer's number; elsewhere, what holds the tensor."""
    found = _MODULE.match(name)
    return found[0] if found else name.rpartition(".")[0]


def _hashes(entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(entries, pool.map(_hash, entries.values()), strict=True))


def _hash(entry: TensorEntry) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(entry):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(entry: TensorEntry) -> Iterator[bytes]:
    """Yield a tensor's bytes in pieces. Raises StorageError where the file has become shorter."""
    begin, end = entry.span
    with storage_errors(f"{entry.file}: cannot be read"), open_regular(entry.file) as file:
        while begin < end:
            piece = os.pread(file.fileno(), min(_PIECE_BYTES, end - begin), begin)
            if not piece:
                raise StorageError(f"{entry.file}: was cut while it was read: write it again")
            begin += len(piece)
            yield piece


def _write_tensors(entries: Mapping[str, TensorEntry], path: Path) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.span[1] - entry.span[0]
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries.values():
            file.writelines(_pieces(entry))
