"""Copies of a checkpoint with one thing wrong each, made of headers and holes: no tensor is read or written, whatever the model's size."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

DAMAGES = ("no files", "a cut file", "a tensor missing", "another shape")


def damaged(model: Path, place: Path, damage: str) -> Path:
    """Make the copy at `place` and return it; "no files": there is nothing at all."""
    if damage == "no files":
        return place
    place.mkdir(parents=True)
    files = sorted(model.glob("*.safetensors"))
    for path in model.iterdir():
        if path.is_file() and path not in files:
            (place / path.name).symlink_to(path.absolute())
    for number, path in enumerate(files):
        _copy(path, place / path.name, damage if number == 0 else "")
    return place


def _copy(source: Path, target: Path, damage: str) -> None:
    with source.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(length))
    names = [name for name in header if name != "__metadata__"]
    size = max(header[name]["data_offsets"][1] for name in names)
    last = max(names, key=lambda name: header[name]["data_offsets"][1])
    if damage == "a tensor missing":
        size = header.pop(last)["data_offsets"][0]
    if damage == "another shape":
        header[last]["shape"] = [1, *header[last]["shape"]]
    content = json.dumps(header).encode()
    with target.open("wb") as stream:
        stream.write(len(content).to_bytes(8, "little") + content)
    os.truncate(target, 8 + len(content) + size - (damage == "a cut file"))
