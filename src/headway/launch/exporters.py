"""Where the rows of a run go: its own files, the progress line, and what `metrics.exporters` names.

The user's exporters are made, called and closed in threads of their own (`headway.adapters.exporters.behind`): whatever they do, the run
goes on and its own files are complete.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from headway.adapters.exporters.behind import CLOSE_SECONDS, BehindExporter
from headway.adapters.exporters.console import ConsoleExporter
from headway.adapters.exporters.jsonl import JsonlExporter
from headway.entries import load_entry
from headway.formats.run_directory import RunDirectory
from headway.launch.closers import Closers
from headway.protocols import Exporter
from headway.settings import Config

MakeExporter = Callable[[Path], Exporter]
_KEY = "metrics.exporters"


def named_exporters(config: Config, base: Path) -> Mapping[str, MakeExporter]:
    """Import what `metrics.exporters` names. Raises ConfigError."""
    return {entry: load_entry(entry, base, key=_KEY) for entry in config.metrics.exporters}


def open_exporters(config: Config, directory: RunDirectory, named: Mapping[str, MakeExporter], closers: Closers) -> Sequence[Exporter]:
    """Return all exporters of a run; `closers` close them, each within `run.shutdown_seconds`."""
    own: dict[str, Exporter] = {
        "the metrics files": JsonlExporter(directory),
        "the progress line": ConsoleExporter(config.metrics.progress, sys.stderr),
    }
    seconds = min(CLOSE_SECONDS, config.run.shutdown_seconds / 2)  # so that it says itself what it has lost
    foreign = {
        f"exporter {entry}": BehindExporter(entry, partial(make, directory.path), close_seconds=seconds) for entry, make in named.items()
    }
    exporters = own | foreign
    for name, exporter in exporters.items():
        closers.add_blocking(name, exporter.close)
    return list(exporters.values())
