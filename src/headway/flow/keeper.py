"""The keeper sees that a run's disks do not fill up: it removes what is no longer needed, and closes the gate before there is no room.

After each batch that is formed or trained it has the journal removed rollouts that nobody needs and batch directories retired
(`rules.retention` says which, and when). Beside that it looks at the free space: below `run.min_free_bytes` no further group starts, while
what is in flight finishes and training goes on; once there is room again, so does the rest. It never ends a run: whoever cannot write does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

from headway.errors import StorageError
from headway.flow.watch import Watch
from headway.rules.retention import Groups, needed_groups, remembered, removal_due, retired_below, short_of_space

_log = logging.getLogger("headway")

FreeSpace = Callable[[], Awaitable[tuple[int, str]]]
CHECK_SECONDS = 1.0


class Keeper:
    """Retention beside the path.

    `prune` takes the groups that are needed, `retire` the batch below which directories may go, `flush` returns once what is recorded is
    durable; `free_space` gives the bytes that are free where the fewest are, and where that is; `heed_space` is told whether there is too
    little.
    """

    def __init__(
        self,
        *,
        watch: Watch,
        prune: Callable[[Collection[int]], Awaitable[None]],
        retire: Callable[[int], Awaitable[None]] | None,
        flush: Callable[[], Awaitable[None]],
        free_space: FreeSpace | None,
        heed_space: Callable[[bool], None],
        keep_payloads: int,
        keep_batches: int,
        min_free_bytes: int,
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        self._watch = watch
        self._prune = prune
        self._retire = retire
        self._flush = flush
        self._free_space = free_space
        self._heed_space = heed_space
        self._keep_payloads = keep_payloads
        self._keep_batches = keep_batches
        self._min_free_bytes = min_free_bytes
        self._check_seconds = check_seconds
        self._groups: Groups = {}
        self._removed_at = -1
        self.free_bytes: int | None = None

    async def run(self) -> None:
        """Remove what is no longer needed, until cancelled. Raises StorageError."""
        ledger = self._watch.now
        trained = next_batch = -1
        while True:
            await self._watch.until(lambda now, seen=(trained, next_batch): (now.trained, now.next_batch) != seen)  # type: ignore[misc]
            newly_trained = ledger.trained != trained
            trained, next_batch = ledger.trained, ledger.next_batch
            self._groups = remembered(self._groups, ledger, self._keep_payloads)
            if newly_trained:
                await self._remove_unneeded(trained)

    async def watch_space(self) -> None:
        """Look at the free space again and again, until cancelled. Where a disk does not answer, what it said last goes on to hold."""
        if self._free_space is None:
            return
        short, answered = False, True
        while True:
            told = await _asked(self._free_space, warns=answered)
            answered = told is not None
            self.free_bytes = None if told is None else told[0]
            if told is not None and short_of_space(told[0], self._min_free_bytes, short) is not short:
                short = not short
                self._heed_space(short)
                self._tell(short, *told)
            await asyncio.sleep(self._check_seconds)

    async def _remove_unneeded(self, trained: int) -> None:
        needed = None
        if removal_due(trained, self._removed_at, self._keep_payloads):
            self._removed_at = trained
            needed = needed_groups(self._groups, self._watch.now, self._keep_payloads)
        await self._flush()  # a group whose drop is not durable is alive for whoever takes the run up
        if needed is not None:
            await self._prune(needed)
        if self._retire is not None and (before := retired_below(trained, self._keep_batches)):
            await self._retire(before)

    def _tell(self, short: bool, free: int, where: str) -> None:  # noqa: FBT001
        if short:
            _log.warning(
                "%s: %d MB free, run.min_free_bytes asks for %d MB: no further group starts until there is room. Remove what you do "
                "not need, or run with a smaller run.keep_batches, run.keep_payloads or trainer.keep_checkpoints",
                where,
                free // 1_000_000,
                self._min_free_bytes // 1_000_000,
            )
        else:
            _log.info("%s: %d MB free: groups start again", where, free // 1_000_000)


async def _asked(free_space: FreeSpace, *, warns: bool) -> tuple[int, str] | None:
    """Return what a disk says; None: it does not answer. That ends no run: it may again, and whoever has to write finds out."""
    try:
        return await free_space()
    except StorageError as error:
        if warns:
            _log.warning("%s; it is asked again", error)
        return None
