"""The shipper persists each batch before anyone is told of it, then hands it to the trainer.

Writing asserts the bound (`formats.batch.assemble`), and shipping that ids come in order, each once: the first half of the double lock. The
trainer asserts both again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from headway.errors import BoundBreached
from headway.flow.channels import Channel
from headway.types import Batch


class Shipper:
    """Writes batches in order and announces them; passes each batch's metrics row on.

    `shipped_again`: (k, metrics row) of batches that an earlier process has persisted and the trainer has not trained on, ascending.
    """

    def __init__(
        self,
        *,
        batches: Channel[Batch],
        rows: Channel[tuple[int, Mapping[str, Any]]],
        write: Callable[[Batch], Awaitable[Mapping[str, Any]]],
        submit: Callable[[int], Awaitable[None]],
        shipped_again: Sequence[tuple[int, Mapping[str, Any]]] = (),
    ) -> None:
        self._batches = batches
        self._rows = rows
        self._write = write
        self._submit = submit
        self._shipped_again = shipped_again
        self._expected: int | None = None  # a run that is taken up again does not begin with 0

    async def run(self) -> None:
        """Announce again what lies persisted, then ship what comes, until the end of the input."""
        for k, row in self._shipped_again:
            self._in_turn(k)
            await self._announce(k, row)
        async for batch in self._batches:
            self._in_turn(batch.k)
            await self._announce(batch.k, await self._write(batch))
        self._rows.close()

    def _in_turn(self, k: int) -> None:
        if self._expected is not None and k != self._expected:
            raise BoundBreached(f"batch {k} is to be shipped where batch {self._expected} comes next")
        self._expected = k + 1

    async def _announce(self, k: int, row: Mapping[str, Any]) -> None:
        await self._submit(k)
        await self._rows.send((k, row))
