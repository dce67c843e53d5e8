"""A fake as a process of its own, which can be killed, stopped and started again."""

from __future__ import annotations

import signal
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

from headway.testing.log import Entry, read_log


class FakeProcess(ABC):
    """What all fakes in processes have in common; a subclass has `start`. Usable in a `with` statement: started, and killed at its end."""

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self.process: subprocess.Popen[Any] | None = None

    @abstractmethod
    def start(self) -> Self:
        """Start it, ending what still runs."""

    def entries(self) -> list[Entry]:
        """Return what it has logged, over all its starts."""
        return read_log(self.log_path)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal: SIGSTOP and SIGCONT for one that hangs."""
        if self.process is not None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End it as kill -9 does; idempotent. `start` brings a fresh one up."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Kill."""
        self.kill()
