"""`headway` in a process that kills itself before or after its n-th commit: python run_and_die.py N before|after run ..."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from headway.adapters.journal import sqlite
from headway.cli import main

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.events import AnyEvent
    from headway.protocols import Entry


class DyingJournal(sqlite.SqliteJournal):
    """The journal as it is, in a process whose last commit is known."""

    at = 0
    before = False
    commits = 0

    async def append(self, entries: Sequence[Entry]) -> Sequence[AnyEvent]:
        """Write the entries, unless the process ends before or after."""
        type(self).commits += 1
        if self.commits == self.at and self.before:
            _die()
        written = await super().append(entries)
        if self.commits == self.at:
            _die()
        return written


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    DyingJournal.at, DyingJournal.before = int(sys.argv[1]), sys.argv[2] == "before"
    sqlite.SqliteJournal = DyingJournal  # type: ignore[misc]  # whoever opens a journal gets this one: the launcher of a test, and no test
    main(sys.argv[3:])
