"""Rows of metrics as lines of strict JSON in the run directory: `metrics.jsonl`, `pipeline.jsonl`, `eval.jsonl`.

One write per line, so that a crash leaves at most one torn line, at the end; opening cuts it away. NaN and infinity become null. What
cannot be written is counted and reported once: metrics never end a run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headway.formats.bounded import open_descriptor
from headway.formats.run_directory import RunDirectory

_log = logging.getLogger("headway.metrics")  # told at the terminal, too (headway.launch.telling)
_TAIL_BYTES = 1 << 20  # a line is far shorter


def _plain(value: Any) -> Any:
    """Turn numpy's numbers into Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a row of metrics holds {type(value).__name__}: only JSON values can be exported")


class JsonlExporter:
    """Appends rows of each stream to its file; `failures` counts the rows that were lost."""

    def __init__(self, run: RunDirectory) -> None:
        self.failures = 0
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self._paths = {"metrics": run.metrics_jsonl, "pipeline": run.pipeline_jsonl, "eval": run.eval_jsonl}
        self._files: dict[str, int] = {}

    def export(self, stream: str, row: Mapping[str, Any]) -> None:
        """Append one row to its stream; never raises, and never waits for the disk."""
        try:
            self._append(stream, self._encoder.encode(row) + b"\n")
        except Exception as error:  # noqa: BLE001  whatever a row holds or the disk does, the run goes on
            self.failures += 1
            if self.failures == 1:
                where = self._paths.get(stream, stream)
                _log.warning("%s: a row of metrics is lost: %s: later losses are only counted", where, error)

    def close(self) -> None:
        """Release the files; idempotent."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _append(self, stream: str, line: bytes) -> None:
        if stream not in self._files:
            self._files[stream] = _open(self._paths[stream])
        file = self._files[stream]
        if (written := os.write(file, line)) < len(line):
            os.ftruncate(file, os.fstat(file).st_size - written)  # a full disk took a part: leave whole lines only
            raise OSError("the disk is full")


def _open(path: Path) -> int:
    """Open for appending, behind the last whole line."""
    file = open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    size = os.fstat(file).st_size
    start = max(0, size - _TAIL_BYTES)
    os.ftruncate(file, start + os.pread(file, size - start, start).rfind(b"\n") + 1)
    return file
