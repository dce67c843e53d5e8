"""What a trainer offers beside the directory of a version: other ways to the same weights, named in the version's manifest.

    "offers": {"delta": {"base": 16, "directory": "deltas/00000017", "bytes": 1048576},
               "memory": {"directory": "/dev/shm/headway-<run id>/00000017"}}

An offer may be used or not: the directory of the version is complete. A way that this headway does not know is none of its business.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway.formats.bounded import brief
from headway.formats.shared_memory import lies_there

KEY = "offers"


class DeltaOffer(msgspec.Struct, frozen=True):
    """A delta (`formats.delta`) from version `base`, `bytes` large; in a manifest, relative to the run directory."""

    base: Annotated[int, Meta(ge=0)]
    directory: str
    bytes: Annotated[int, Meta(ge=0)]


class MemoryOffer(msgspec.Struct, frozen=True):
    """A complete copy of the version in shared memory (`formats.shared_memory`), for processes of this machine."""

    directory: str


def read_offers(said: object, *, run: Path, version: int) -> tuple[Mapping[str, Any], str]:
    """Return the offers of a manifest by way ("delta": DeltaOffer, "memory": MemoryOffer), their paths absolute, and what was wrong.

    Wrong ones are left out; "" where none was.
    """
    if said is None:
        return {}, ""
    if not isinstance(said, dict):
        return {}, f'"{KEY}" must be an object'
    offers: dict[str, Any] = {}
    problems: list[str] = []
    for way, read in (("delta", _delta), ("memory", _memory)):
        if way in said:
            try:
                offers[way] = read(said[way], run, version)
            except (ValueError, msgspec.ValidationError) as error:
                problems.append(f'"{way}": {brief(error)}')
    return offers, "; ".join(problems)


def _delta(said: object, run: Path, version: int) -> DeltaOffer:
    offer = msgspec.convert(said, DeltaOffer)
    path = PurePosixPath(offer.directory)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in offer.directory:
        raise ValueError(f"directory {offer.directory!r} must lie in the run directory")
    if offer.base >= version:
        raise ValueError(f"base {offer.base} must be older than the version ({version})")
    return msgspec.structs.replace(offer, directory=str(run / path))


def _memory(said: object, run: Path, version: int) -> MemoryOffer:  # noqa: ARG001  as the others
    offer = msgspec.convert(said, MemoryOffer)
    if not lies_there(offer.directory):
        raise ValueError(f"directory {offer.directory!r} must be a version of a run in shared memory")
    return offer
