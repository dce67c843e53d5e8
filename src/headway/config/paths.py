"""Where a run's directories lie, by its config."""

from __future__ import annotations

from pathlib import Path

from headway.formats.run_directory import RunDirectory
from headway.settings import Config

NAME = "{name}"


def run_path(config: Config) -> Path:
    """Return the run directory, relative to where headway was started."""
    return Path(config.run.directory.replace(NAME, config.run.name)).expanduser()


def state_path(config: Config) -> Path:
    """Return the directory of journal and payloads."""
    if not config.run.state_directory:
        return RunDirectory(run_path(config)).state
    return Path(config.run.state_directory.replace(NAME, config.run.name)).expanduser()
