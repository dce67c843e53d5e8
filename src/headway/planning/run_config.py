"""What a run's config says of its world, as far as scenarios know such things; read from the run directory.

A config of an older headway may lack keys: they have the defaults of today.
"""

from __future__ import annotations

import tomllib
from typing import Any, TypeVar

import msgspec

from headway.formats.bounded import read_regular
from headway.formats.files import storage_errors
from headway.reports.run_files import RunFiles, sane
from headway.settings import DebugSection, EngineSection, EnvironmentSection, EvalSection, TrainerSection

Section = TypeVar("Section", bound=msgspec.Struct)


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sections that matter; `outside`: rollouts of other sources are trained on too."""

    engine: EngineSection
    environment: EnvironmentSection
    trainer: TrainerSection
    eval: EvalSection | None
    debug: DebugSection
    outside: bool


def run_config(run: RunFiles) -> RunConfig:
    """Read it; raises StorageError."""
    path = run.directory.config
    with storage_errors(f"{path}: cannot be read"):
        text = read_regular(path)
    with sane(path):
        tables = tomllib.loads(text.decode())
        return RunConfig(
            engine=_section(tables, "engine", EngineSection),
            environment=_section(tables, "environment", EnvironmentSection),
            trainer=_section(tables, "trainer", TrainerSection),
            eval=_section(tables, "eval", EvalSection) if "eval" in tables else None,
            debug=_section(tables, "debug", DebugSection),
            outside="replay" in tables or "ingest" in tables,
        )


def _section(tables: dict[str, Any], name: str, kind: type[Section]) -> Section:
    known = {key: value for key, value in tables.get(name, {}).items() if key in kind.__struct_fields__}
    return msgspec.convert(known, kind)
