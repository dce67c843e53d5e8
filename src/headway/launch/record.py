"""run.json while a run plays: which software its engines and its trainer are, as they say themselves, and how it ended.

What they say becomes known as they are met: engines once they serve, a trainer by the first version that it publishes. It is written down
then; where it differs from what the process before had met, that is pointed out.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

import msgspec

from headway.errors import StorageError
from headway.formats.run_directory import Ending, RunDirectory, RunInfo, save_run_info
from headway.formats.software import UNKNOWN
from headway.launch.telling import tell
from headway.protocols import Engine

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
        if _is_news("the trainer", self.info.trainer_version, software):
            self.info = msgspec.structs.replace(self.info, trainer_version=software)
            self._changed.set()

    async def _ask(self, engines: Sequence[Engine]) -> None:
        told = ", ".join(sorted(set(await asyncio.gather(*(engine.software() for engine in engines)))))
        if _is_news("the engine", self.info.engine_version, told):
            self.info = msgspec.structs.replace(self.info, engine_version=told)
            self._changed.set()

    async def keep(self, engines: Sequence[Engine]) -> None:
        """Ask these engines, and write down what becomes known, until cancelled; what cannot be written is no reason to end a run."""
        if engines:
            await self._ask(engines)
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


def _is_news(what: str, before: str, now: str) -> bool:
    """Whether this was not known; points it out where something else was."""
    if now == before:
        return False
    if before != UNKNOWN:
        tell(f"{what} was {before} and is {now} now")
    return True
