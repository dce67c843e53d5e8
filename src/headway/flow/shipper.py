"""The shipper persists each batch before anyone is told of it, then hands it to the trainer.

Writing asserts the bound (`formats.batch.assemble`), and shipping that ids come in order, each once: the first half of the double lock. The
trainer asserts both again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from headway.errors import BoundBreached
from headway.flow.channels import Channel
from headway.types import Batch


class Shipper:
    """Writes batches in order and announces them; passes each batch's metrics row on."""

    def __init__(
        self,
        *,
        batches: Channel[Batch],
        rows: Channel[tuple[int, Mapping[str, Any]]],
        write: Callable[[Batch], Awaitable[Mapping[str, Any]]],
        submit: Callable[[int], Awaitable[None]],
    ) -> None:
        self._batches = batches
        self._rows = rows
        self._write = write
        self._submit = submit

    async def run(self) -> None:
        """Ship what comes, until the end of the input."""
        expected: int | None = None  # a run that is taken up again does not begin with 0
        async for batch in self._batches:
            if expected is not None and batch.k != expected:
                raise BoundBreached(f"batch {batch.k} is to be shipped where batch {expected} comes next")
            expected = batch.k + 1
            row = await self._write(batch)
            await self._submit(batch.k)
            await self._rows.send((batch.k, row))
        self._rows.close()
