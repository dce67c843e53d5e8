"""The rows of `metrics.jsonl` of a run that is taken up again: one for every batch that its weights have trained on, and none besides."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from headway.adapters.batch_store import metrics_of
from headway.errors import TrainerFailed
from headway.formats.batch_metrics import joined
from headway.formats.bounded import read_regular
from headway.formats.files import storage_errors, write_atomically
from headway.formats.run_directory import RunDirectory, numbered

_log = logging.getLogger("headway")


class _Head(msgspec.Struct):
    batch: int = -1


async def complete_rows(
    run: RunDirectory, version: int, trainer_metrics: Callable[[int], Awaitable[Mapping[str, Any]]], *, before: str, acknowledged: int
) -> tuple[int, int]:
    """Add the rows that a crash kept from being written; take out those of batches that will be trained anew.

    Rows of batches from `acknowledged` on were written by a run that was stopped, before the trainer had measured them: they are made anew.

    What is taken out goes to `metrics-<before>.jsonl`, by the lineage that it belongs to. Returns how many were added and taken out.
    """
    found = _lines(run)
    lines = [line for line in found if _batch(line) >= 0]
    rows: dict[int, bytes] = {}
    for line in lines:
        rows.setdefault(_batch(line), line)  # a batch counts once
    missing = [k for k in numbered(run.batches) if k < version and (k not in rows or k >= acknowledged)]
    added = {k: row for k in missing if (row := metrics_of(run, k)) is not None}
    undone = [line for line in lines if _batch(line) >= version]
    if len(lines) < len(found):  # what a disk or an editor has made of them
        _log.warning("%s: %d lines are no rows and are taken out", run.metrics_jsonl, len(found) - len(lines))
    if not added and not undone and len(lines) == len(found):
        return 0, 0
    for k, row in added.items():
        measured: Mapping[str, Any] = {}
        try:
            measured = await trainer_metrics(k)
        except TrainerFailed as error:  # a machine that went down may leave half a file: figures are no reason to stay down
            _log.warning("%s; the row of batch %d goes without what it says", error, k)
        rows[k] = msgspec.json.encode(joined(row, measured))
    if undone:
        path = run.metrics_jsonl.with_name(f"metrics-{before}.jsonl")
        with storage_errors(f"{path}: cannot be written"):
            earlier = read_regular(path) if path.exists() else b""
            write_atomically(path, earlier + b"".join(line + b"\n" for line in undone))
    with storage_errors(f"{run.metrics_jsonl}: cannot be written"):
        write_atomically(run.metrics_jsonl, b"".join(rows[k] + b"\n" for k in sorted(rows) if k < version))
    return len(added), len(undone)


def _lines(run: RunDirectory) -> list[bytes]:
    """Return the whole lines; what a crash tore off is no line."""
    with storage_errors(f"{run.metrics_jsonl}: cannot be read"):
        data = read_regular(run.metrics_jsonl) if run.metrics_jsonl.exists() else b""
    return [line for line in data[: data.rfind(b"\n") + 1].split(b"\n") if line]


def _batch(line: bytes) -> int:
    try:
        return msgspec.json.decode(line, type=_Head).batch
    except msgspec.MsgspecError:
        return -1
