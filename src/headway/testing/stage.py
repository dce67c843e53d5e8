"""A stage for black-box tests: fake engines, a fake environment and a fake trainer around a real `headway run`, started as a person would.

    with Stage(tmp_path, settings={"run.steps": 4}) as stage:
        ended = stage.play()
        assert ended.code == 0, ended.err

Everything lies in the directory given: run.toml, the model, the run, the fakes' logs. Nothing here needs torch or an event loop.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from headway.config.toml import toml_value
from headway.testing.acts import EnvironmentScript
from headway.testing.check import assert_run
from headway.testing.engine import EngineProcess, EngineScript
from headway.testing.log import Entry, read_log
from headway.testing.model import write_tiny_model
from headway.testing.trainer import TrainerProcess, TrainerScript

LIMIT_SECONDS = 120.0
SETTINGS: Mapping[str, Any] = {
    "run.steps": 4,
    "run.drain_timeout_seconds": 20,
    "rollout.groups_per_batch": 3,
    "rollout.group_size": 4,
    "rollout.max_concurrent": 24,
    "rollout.max_staleness": 2,
    "rollout.steps_ahead": 1,
    "rollout.max_tokens": 8,
    "rollout.timeout_seconds": 30,
    "environment.entry": "headway.testing.environment:attempt",
    "environment.cleanup_seconds": 1,
    "prompts.source": "headway.testing.environment:prompts",
    "metrics.interval_seconds": 0.2,
    "trainer.kind": "external",
}
"""What a stage's run is set to, unless `settings` say otherwise."""


@dataclass(frozen=True)
class Ended:
    """How `headway run` ended: exit code (-9: killed), what it printed, how long it took."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def last_error(self) -> str:
        """The line that says what went wrong; empty when there is none."""
        return next((line for line in reversed(self.err.splitlines()) if line.startswith("headway: ")), "")


class Playing:
    """A `headway run` under way."""

    def __init__(self, process: subprocess.Popen[str], output: tuple[Path, Path]) -> None:
        self.process = process
        self._output = output
        self._started = time.monotonic()

    @property
    def has_ended(self) -> bool:
        """Whether its process has."""
        return self.process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the orchestrator alone, as a terminal or a supervisor does."""
        self.process.send_signal(number)

    def end(self, *, limit: float = LIMIT_SECONDS) -> Ended:
        """Wait for its end; one that does not end within `limit` seconds is killed, and TimeoutError raised."""
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"headway run did not end within {limit:g} s: {self._output[1].read_text()[-2000:]}") from None
        return self._how()

    def kill(self) -> Ended:
        """End the orchestrator as kill -9 does."""
        self.process.kill()
        self.process.wait()
        return self._how()

    def _how(self) -> Ended:
        out, err = (path.read_text("utf-8", "replace") for path in self._output)
        return Ended(self.process.returncode, out, err, time.monotonic() - self._started)


class Stage:
    """Fakes around runs of one directory. `engines`, `trainer` are processes; `run` is the run directory; all end with the block."""

    def __init__(
        self,
        directory: Path,
        *,
        settings: Mapping[str, Any] = {},
        engines: Sequence[EngineScript] = (EngineScript(),),
        environment: EnvironmentScript | None = None,
        trainer: TrainerScript | None = None,
        name: str = "run",
    ) -> None:
        self.directory = directory
        self.run = directory / name
        self.config = directory / "run.toml"
        self.engines = [EngineProcess(directory, script=script, name=f"engine-{index}") for index, script in enumerate(engines)]
        self.trainer = TrainerProcess(self.run, directory, script=trainer)
        self.variables = (environment or EnvironmentScript()).write(directory)
        self.runs: list[Playing] = []
        self._settings = {**SETTINGS, "run.directory": str(self.run), "model.path": str(directory / "model"), **settings}

    def __enter__(self) -> Self:
        """Start engines and trainer."""
        write_tiny_model(self.directory / "model")
        for engine in self.engines:
            engine.start()
        self.write_config()
        self.trainer.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End everything."""
        for run in self.runs:
            run.kill()
        self.trainer.kill()
        for engine in self.engines:
            engine.kill()

    def write_config(self, **settings: Any) -> None:
        """Write run.toml anew, with these settings (dots as `__`) beside those of the stage."""
        self._settings |= {name.replace("__", "."): value for name, value in settings.items()}
        values = {"engine.urls": [engine.url for engine in self.engines], **self._settings}
        sections: dict[str, list[str]] = {}
        for name, value in values.items():
            section, _, key = name.rpartition(".")
            sections.setdefault(section, []).append(f"{key} = {toml_value(value)}")
        self.config.write_text("\n".join(line for section, lines in sections.items() for line in (f"[{section}]", *lines)) + "\n")

    def start(self, *settings: str, resume: bool = False, variables: Mapping[str, str] = {}, **options: Any) -> Playing:
        """Start `headway run`, with `--set` for each setting ("run.steps=8"); `options` are Popen's."""
        command = [sys.executable, "-m", "headway", "run", str(self.config), *(["--resume"] if resume else [])]
        command += [part for setting in settings for part in ("--set", setting)]
        number = len(self.runs)
        output = self.directory / f"run-{number}.out", self.directory / f"run-{number}.err"
        with output[0].open("w") as out, output[1].open("w") as err:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                cwd=self.directory,
                env={**os.environ, **self.variables, **variables},
                start_new_session=True,
                **options,
            )
        playing = Playing(process, output)
        self.runs.append(playing)
        return playing

    def play(self, *settings: str, resume: bool = False, limit: float = LIMIT_SECONDS, **options: Any) -> Ended:
        """Start `headway run` and wait for its end."""
        return self.start(*settings, resume=resume, **options).end(limit=limit)

    def until(self, condition: Callable[[], Any], *, limit: float = LIMIT_SECONDS, what: str = "") -> None:
        """Wait for something that other processes bring about; raises TimeoutError, also when the newest run has ended without it."""
        deadline = time.monotonic() + limit
        while not condition():
            ended = bool(self.runs) and self.runs[-1].has_ended
            if (ended and not condition()) or time.monotonic() > deadline:
                tail = self.runs[-1].end().err[-2000:] if ended else ""
                raise TimeoutError(f"{'the run ended' if ended else f'not within {limit:g} s'}: {what or condition}\n{tail}")
            time.sleep(0.01)

    def until_batch(self, k: int) -> None:
        """Wait until batch `k` is on disk."""
        self.until((self.run / "batches" / f"{k:08d}").exists, what=f"batch {k}")

    def until_version(self, version: int) -> None:
        """Wait until `version` is published by the trainer."""
        self.until((self.run / "weights" / f"{version:08d}" / "manifest.json").exists, what=f"version {version}")

    def check(self, ended: Ended) -> None:
        """Hold the run, and the logs of all fakes, against the ten invariants; raises AssertionError with every violation."""
        assert_run(
            self.run,
            engine_logs=self.engine_logs,
            trainer_logs=[self.trainer.log_path],
            environment_logs=[self.environment_log],
            exit_code=ended.code,
        )

    # -------------------------------------------------------------------------------------------------------------- what was left behind

    @property
    def engine_logs(self) -> list[Path]:
        """The logs of the engines."""
        return [engine.log_path for engine in self.engines]

    @property
    def environment_log(self) -> Path:
        """The log of the environment, of all workers."""
        return self.directory / "environment.jsonl"

    def info(self) -> dict[str, Any]:
        """run.json."""
        info: dict[str, Any] = json.loads((self.run / "run.json").read_bytes())
        return info

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a JSONL file of the run; a missing file has none."""
        with contextlib.suppress(FileNotFoundError):
            return [msgspec.json.decode(line) for line in (self.run / name).read_bytes().split(b"\n")[:-1]]
        return []

    def requests(self, *what: str) -> list[Entry]:
        """Entries of all engines' logs, of these kinds (none given: all), in order of time."""
        found = [entry for engine in self.engines for entry in engine.entries() if not what or entry["what"] in what]
        return sorted(found, key=lambda entry: float(entry["time"]))

    def environment_entries(self, *what: str) -> list[Entry]:
        """Entries of the environment's log, of these kinds (none given: all)."""
        return [entry for entry in read_log(self.environment_log) if not what or entry["what"] in what]
