"""Fake trainers for tests: as a process of its own, which can be killed and stopped, or on a thread, at hand."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from headway.lifeline import VARIABLE
from headway.testing.log import Entry, FakeLog
from headway.testing.process import FakeProcess
from headway.testing.trainer.loop import TrainerLoop
from headway.testing.trainer.script import TrainerScript


class TrainerProcess(FakeProcess):
    """`python -m headway.testing.trainer RUN` under way. `directory` takes its script, its log and what it prints."""

    def __init__(self, run: Path, directory: Path, *, script: TrainerScript | None = None, name: str = "trainer") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.run = run
        super().__init__(directory / f"{name}.jsonl")
        self.output = directory / f"{name}.out"
        self._script = directory / f"{name}.script.json"
        self._script.write_bytes(msgspec.json.encode(script or TrainerScript()))

    def start(self) -> Self:
        """Start it; it waits for the run's directory. Called again, it ends what still runs, and takes up the newest version."""
        self.kill()
        command = [sys.executable, "-m", "headway.testing.trainer", str(self.run), "--script", str(self._script)]
        variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--log", str(self.log_path)], stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=variables
            )
        return self


class _Died(BaseException):
    """How a trainer on a thread is killed."""


def _die() -> None:
    raise _Died


class TrainerThread:
    """A fake trainer on a thread. `failure`: what it ended by, if by an error."""

    def __init__(self, run: Path, *, script: TrainerScript | None = None, log: Path | None = None) -> None:
        self.log = FakeLog(log)
        self.failure: Exception | None = None
        self._stop = threading.Event()
        self._loop = TrainerLoop(run, script or TrainerScript(), self.log, dies=_die)
        self._thread = threading.Thread(target=self._run, name="fake trainer", daemon=True)

    def start(self) -> Self:
        """Start it."""
        self._thread.start()
        return self

    def entries(self) -> list[Entry]:
        """Return what it has logged so far."""
        return list(self.log.entries)

    def stop(self) -> None:
        """End it and wait for it; idempotent."""
        self._stop.set()
        self._thread.join(10)
        self.log.close()

    def _run(self) -> None:
        with contextlib.suppress(_Died):
            try:
                self._loop.run(self._stop)
            except Exception as error:  # noqa: BLE001 -- kept for whoever asks
                self.failure = error


@contextlib.contextmanager
def trainer_thread(run: Path, *, script: TrainerScript | None = None, log: Path | None = None) -> Iterator[TrainerThread]:
    """Train the run on a thread within the block."""
    trainer = TrainerThread(run, script=script, log=log).start()
    try:
        yield trainer
    finally:
        trainer.stop()
