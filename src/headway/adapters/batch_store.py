"""Batches go to the run directory: assembled, written and published in a thread, durable before anyone is told of them.

For a run that is taken up again it tells which of them lie there whole, and removes those that are dissolved.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from headway.errors import StorageError
from headway.flow.take_up import StoredBatch
from headway.formats.batch import METRICS, BatchFacts, assemble, write_batch
from headway.formats.files import remove_temporaries, storage_errors, temporary_sibling
from headway.formats.manifest import read_manifest, verify
from headway.formats.run_directory import RunDirectory, numbered, set_aside
from headway.types import Batch

_log = logging.getLogger("headway")


class DirectoryBatchStore:
    """Writes `batches/<k>` of one lineage."""

    def __init__(self, run: RunDirectory, lineage: str) -> None:
        self._run = run
        self._lineage = lineage

    async def write(self, batch: Batch) -> Mapping[str, Any]:
        """Persist the batch under its id and return its metrics row. Raises StorageError, and BoundBreached for a breach of the bound."""
        return await asyncio.to_thread(self._write, batch)

    def _write(self, batch: Batch) -> Mapping[str, Any]:
        assembled = assemble(batch)
        write_batch(self._run, assembled, self._lineage)
        return assembled.metrics


def stored_batch(run: RunDirectory, k: int) -> StoredBatch | None:
    """Tell of a batch that lies there whole; None where none does, or a damaged one."""
    directory = run.batch(k)
    manifest = read_manifest(directory)
    if manifest is None or (manifest.kind, manifest.id) != ("batch", k):
        return None
    try:
        verify(directory, manifest)
        facts = msgspec.convert(manifest.extra, BatchFacts)
    except (StorageError, msgspec.ValidationError) as error:
        _log.warning("batch %d is formed anew: %s", k, error)
        return None
    row = manifest.extra.get(METRICS)
    return StoredBatch(
        lineage=manifest.lineage,
        max_staleness=facts.max_staleness,
        on_stale=facts.on_stale,
        row=row if isinstance(row, dict) else {},
    )


def metrics_of(run: RunDirectory, k: int) -> Mapping[str, Any] | None:
    """Return the orchestrator's metrics row of a batch, by its manifest alone; None: it does not say."""
    manifest = read_manifest(run.batch(k))
    row = manifest.extra.get(METRICS) if manifest is not None else None
    return row if isinstance(row, dict) else None


def remove_batches(run: RunDirectory, first: int, *, lineages: Collection[str]) -> list[int]:
    """Remove the directories of batches from `first` on, and return which there were: dissolved ones, and any that nobody knows of.

    One that names another run's lineage is not this run's to remove: it is kept under another name.
    """
    found = [k for k in numbered(run.batches) if k >= first]
    with storage_errors(f"{run.batches}: batches that will be formed anew cannot be removed"):
        for k in found:
            manifest = read_manifest(run.batch(k))
            if manifest is not None and manifest.lineage not in lineages:
                name = set_aside(run.batch(k), "foreign")
                _log.warning("%s: is of lineage %s, which is none of this run's; set aside as %s", run.batch(k), manifest.lineage, name)
                continue
            gone = temporary_sibling(run.batch(k))  # what is half removed does not exist
            run.batch(k).rename(gone)
            shutil.rmtree(gone)
        remove_temporaries(run.batches)
    return found
