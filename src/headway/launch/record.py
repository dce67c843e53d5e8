"""run.json while a run plays: which software its engines and its trainer are, as they say themselves, and how it ended.

What they say becomes known as they are met: engines once they serve (such as join later, too), a trainer by the first version that it
publishes. It is written down then; where it is something that the process before had not met, that is pointed out.
"""

from __future__ import annotations

import asyncio
import logging
import threading

import msgspec

from headway.errors import StorageError
from headway.flow.engine_seats import EngineSeats
from headway.formats.run_directory import Ending, RunDirectory, RunInfo, save_run_info
from headway.formats.software import UNKNOWN
from headway.launch.telling import tell

_BETWEEN = ", "  # of several engines
_log = logging.getLogger("headway")


class RunRecord:
    """The `info` of one run, kept in its run.json."""

    def __init__(self, directory: RunDirectory, info: RunInfo) -> None:
        self.info = info
        self._directory = directory
        self._writing = threading.Lock()
        self._changed = asyncio.Event()

    def trainer_is(self, software: str) -> None:
        """Note which software has written the version that was found last."""
        before = self.info.trainer_version
        if software == before:
            return
        if before != UNKNOWN:
            tell(f"the trainer was {before} and is {software} now")
        self.info = msgspec.structs.replace(self.info, trainer_version=software)
        self._changed.set()

    async def meet(self, pool: EngineSeats) -> None:
        """Ask the engines of a pool once they serve, those that join later too, until cancelled. What one said stays when it leaves.

        Those of the start are asked together, and it is pointed out where they are not what the process before had met. Of those that join
        it is where one is like none that was met before: others of them may still come.
        """
        met: set[str] = set()
        told: set[str] = set()
        was = self.info.engine_version
        known = set(was.split(_BETWEEN)) - {UNKNOWN}
        at_once = bool(pool.engines)
        await pool.until_all_serve()
        while True:
            await pool.until_serving(beside=met)
            new = [engine for engine in pool.serving if engine.name not in met]
            met.update(engine.name for engine in new)
            told.update(await asyncio.gather(*(engine.software() for engine in new)))
            now = _BETWEEN.join(sorted(told))
            if known:
                if not told <= known or (at_once and told != known):
                    tell(f"the engine was {was} and is {now} now")
                known |= told
            at_once = False
            if now != self.info.engine_version:
                self.info = msgspec.structs.replace(self.info, engine_version=now)
                self._changed.set()

    async def keep(self) -> None:
        """Write down what becomes known, until cancelled; what cannot be written is no reason to end a run."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await asyncio.to_thread(self._write)
            except StorageError as error:
                _log.warning("%s", error)

    def end(self, ending: Ending) -> None:
        """Write how the run ended. Raises StorageError."""
        self.info = msgspec.structs.replace(self.info, ended=ending)
        self._write()

    def _write(self) -> None:
        with self._writing:  # whoever comes last writes the newest
            save_run_info(self._directory, self.info)
