"""Batches go to the run directory: assembled, written and published in a thread, durable before anyone is told of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from headway.formats.batch import assemble, write_batch
from headway.formats.run_directory import RunDirectory
from headway.types import Batch


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
