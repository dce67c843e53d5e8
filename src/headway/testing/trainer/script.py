"""What the fake trainer is told to do, and the whole as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

NotNegative = Annotated[float, Meta(ge=0)]


class TrainerScript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a fake trainer behaves; all defaults: an honest and quick one. Batches and versions by number.

    `step_seconds` per batch. `stall_at`: before batch k nothing happens for `stall_seconds` (0: for ever). `die_at`: killed (-9) once batch
    k is read, by each start anew, `deaths` times in all; `refuse_at`: it ends with exit code 1 and a reason instead. `unpublished`:
    versions that are made and not published. `publish_every`: only each n-th version is published.

    `shard_seconds`: so long between a version's files and its manifest. `in_place`: it is written under its final name and not renamed, the
    manifest last. `half_written`: these versions never get their manifest, and training goes on. `keep`: versions kept, 0: all;
    `undeletable`: versions that retention fails to remove. `software`: which it says that it is, in the manifests of its weights.
    """

    step_seconds: NotNegative = 0.0
    stall_at: int = -1
    stall_seconds: NotNegative = 0.0
    die_at: int = -1
    deaths: int = 1
    refuse_at: int = -1
    unpublished: tuple[int, ...] = ()
    publish_every: int = 1
    shard_seconds: NotNegative = 0.0
    in_place: bool = False
    half_written: tuple[int, ...] = ()
    keep: int = 0
    undeletable: tuple[int, ...] = ()
    software: str = ""


def load_script(path: Path) -> TrainerScript:
    """Read a script from JSON. Raises OSError, msgspec.MsgspecError."""
    return msgspec.json.decode(path.read_bytes(), type=TrainerScript)
