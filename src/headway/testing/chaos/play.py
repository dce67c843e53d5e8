"""Plays a user's own config under the faults of a plan, as a child process, and holds what is left against the ten invariants."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.config import load_config, run_path
from headway.config.paths import NAME
from headway.errors import ConfigError
from headway.formats.files import write_atomically
from headway.formats.run_directory import RunDirectory, numbered
from headway.settings import Config
from headway.testing.chaos.machine import children, delete, give_back, hide, newest_version, send
from headway.testing.chaos.plan import Fault, Plan
from headway.testing.chaos.wrapped import VARIABLE, Weather
from headway.testing.check import Violation, check_run

WRAPPED = "headway.testing.chaos.wrapped:attempt"
Process = subprocess.Popen[bytes]
_LOOK_SECONDS = 0.05
_END_SECONDS = 60.0  # for a run that is stopped by the plan to drain
_MOST_RESUMES = 1000  # a plan that kills the orchestrator again and again is stopped somewhere


@dataclass(frozen=True)
class Verdict:
    """What became of the run: its exit code, what was done to it, and what that has broken."""

    directory: Path
    exit_code: int
    done: Sequence[str]
    not_reached: Sequence[str]
    violations: Sequence[Violation]
    timed_out: bool = False

    @property
    def is_clean(self) -> bool:
        """Whether the run reached its end and kept all invariants."""
        return self.exit_code == 0 and not self.violations and not self.timed_out


@dataclass
class _Due:
    """A fault with its next time; `undo` is what ends one that lasts, at `until`."""

    fault: Fault
    chance: random.Random
    at: float | None = None
    fired: int = 0
    until: float = 0.0
    undo: Callable[[], str] | None = None

    def schedule(self, now: float) -> None:
        """Set the next time, in seconds since the start; None: none, or by batch."""
        fault = self.fault
        if fault.every_seconds is not None:
            self.at = now + fault.every_seconds * self.chance.uniform(0.5, 1.5)
        else:
            self.at = fault.at_seconds if not self.fired else None

    def is_due(self, now: float, batch: int) -> bool:
        """Whether it is to happen now; `batch`: the newest on disk."""
        if self.undo is not None:
            return False
        if self.fault.at_batch is not None:
            return not self.fired and batch >= self.fault.at_batch
        return self.at is not None and now >= self.at


class Chaos:
    """One run under a plan; `say` is told everything that is done, as it is done.

    The run has a name of its own: `name`, or the config's with "-chaos". Raises ConfigError for a plan that this config has no target for.
    """

    def __init__(
        self, config_path: Path, plan: Plan, *, overrides: Sequence[str] = (), name: str | None = None, say: Callable[[str], None]
    ) -> None:
        config, self._overrides = _own_place(config_path, plan, overrides, name)
        _refuse_without_target(config, plan)
        self._config_path = config_path
        self._plan = plan
        self._say = say
        self._run = RunDirectory(run_path(config).absolute())
        self._weather = Weather(config.environment.entry, str(config_path.resolve().parent), plan.seed)
        self._weather_file = self._run.path.with_name(f"{self._run.path.name}.weather.json")
        chance = random.Random(plan.seed)  # noqa: S311 -- reproducible on purpose
        self._dues = [_Due(fault, random.Random(chance.random())) for fault in plan.fault]  # noqa: S311
        self._resumes = 0
        self._newest: Process | None = None
        self._done: list[str] = []
        self._started = time.monotonic()

    def play(self) -> Verdict:
        """Run to the end, with everything planned, and judge."""
        with ExitStack() as ends:  # each of them, whatever becomes of the others; the last first
            ends.callback(self._weather_file.unlink, missing_ok=True)
            ends.callback(self._forget_hidden)
            ends.callback(lambda: _end(self._newest))
            ends.callback(self._undo_all)
            self._write_weather()
            self._started = time.monotonic()
            process, timed_out = self._until_ended(self._start(resume=False))
        not_reached = [f"{due.fault.name} ({_when(due.fault)})" for due in self._dues if not due.fired]
        code = int(process.returncode)
        violations = check_run(self._run.path, exit_code=code) if self._run.run_json.exists() else []
        return Verdict(self._run.path, code, self._done, not_reached, violations, timed_out)

    # --------------------------------------------------------------------------------------------------------------------- the processes

    def _start(self, *, resume: bool) -> Process:
        command = [sys.executable, "-m", "headway", "run", str(self._config_path), *(["--resume"] if resume else [])]
        command += [part for override in self._overrides for part in ("--set", override)]
        variables = {**os.environ, VARIABLE: str(self._weather_file)}
        self._newest = subprocess.Popen(command, env=variables, start_new_session=True, stdin=subprocess.DEVNULL)
        return self._newest

    def _until_ended(self, process: Process) -> tuple[Process, bool]:
        """Let time pass and faults happen until the run has ended; returns its newest process, and whether it took too long."""
        limit = self._plan.limit_seconds or float("inf")
        for due in self._dues:
            due.schedule(0.0)
        while True:
            try:
                process.wait(_LOOK_SECONDS)
                return process, False
            except subprocess.TimeoutExpired:
                pass
            except KeyboardInterrupt:
                self._tell("interrupted: the run drains")
                process.send_signal(signal.SIGINT)
            now = time.monotonic() - self._started
            if now > limit:
                self._tell(f"the run has not ended within {limit:g} s: stopped")
                return process, True
            batch = max(numbered(self._run.batches), default=-1)
            for due in self._dues:
                if due.undo is not None and now >= due.until:
                    self._undo(due)
                if due.is_due(now, batch):
                    process = self._strike(due, now, process)

    def _undo(self, due: _Due) -> None:
        undo, due.undo = due.undo, None
        if undo is not None:
            self._tell(undo())

    def _undo_all(self) -> None:
        with ExitStack() as each:
            for due in self._dues:
                each.callback(self._undo, due)

    # ------------------------------------------------------------------------------------------------------------------------ the faults

    def _strike(self, due: _Due, now: float, process: Process) -> Process:
        """Do it, if what it strikes is there; what is not is tried again at the next look. Returns the run's newest process."""
        if due.fault.kind == "kill" and due.fault.target == "orchestrator":
            told, process = self._kill_orchestrator(process)
        else:
            told = self._act(due, process.pid)
        if told:
            due.fired += 1
            due.until = now + due.fault.for_seconds
            due.schedule(now)
            self._tell(told)
        return process

    def _act(self, due: _Due, parent: int) -> str:
        fault = due.fault
        match fault.kind:
            case "kill" | "stop":
                return _signal(due, parent)
            case "hide_weights" | "delete_weights":
                return self._take_weights(due)
            case "slow_environment":
                due.undo = self._change_weather("slow", slow_share=fault.share, slow_seconds=fault.seconds)
                return f"{fault.share:.0%} of the attempts take {fault.seconds:g} s longer, for {fault.for_seconds:g} s"
            case "failing_environment":
                due.undo = self._change_weather("failing", failing_share=fault.share)
                return f"{fault.share:.0%} of the attempts fail, for {fault.for_seconds:g} s"

    def _kill_orchestrator(self, process: Process) -> tuple[str, Process]:
        if not self._run.run_json.exists() or self._resumes >= _MOST_RESUMES:
            return "", process
        process.kill()
        process.wait()
        self._resumes += 1
        return "the orchestrator was killed, and started again with --resume", self._start(resume=True)

    def _take_weights(self, due: _Due) -> str:
        version = newest_version(self._run)
        if version is None:
            return ""
        hidden = hide(self._run, version, self._hidden)
        if hidden is None:
            return ""
        if due.fault.kind == "delete_weights":
            delete(hidden)
            return f"version {version} was deleted"

        def back() -> str:
            again = give_back(self._run, version, hidden)
            return f"version {version} is back" if again else f"version {version} was made again meanwhile"

        due.undo = back
        return f"version {version} was hidden for {due.fault.for_seconds:g} s"

    @property
    def _hidden(self) -> Path:
        return self._run.path / ".chaos"

    def _forget_hidden(self) -> None:
        """Take the place of hidden versions away; what could not be put back stays there."""
        with suppress(OSError):
            self._hidden.rmdir()

    def _change_weather(self, name: str, **changes: float) -> Callable[[], str]:
        before = {key: getattr(self._weather, key) for key in changes}
        self._weather = msgspec.structs.replace(self._weather, **changes)
        self._write_weather()

        def clear() -> str:
            self._weather = msgspec.structs.replace(self._weather, **before)
            self._write_weather()
            return f"the environment is no longer {name}"

        return clear

    def _write_weather(self) -> None:
        self._weather_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._weather_file, msgspec.json.encode(self._weather))

    def _tell(self, what: str) -> None:
        line = f"{time.monotonic() - self._started:6.1f} s: {what}"
        self._done.append(line)
        self._say(line)


def _own_place(path: Path, plan: Plan, overrides: Sequence[str], name: str | None) -> tuple[Config, list[str]]:
    """Return the config under a name and in directories of its own, and the overrides that bring that about."""
    config = load_config(path, overrides)
    given = [*overrides, f"run.name={name or f'{config.run.name}-chaos'}"]
    for key in ("directory", "state_directory"):
        value = str(getattr(config.run, key))
        if value and NAME not in value:
            given.append(f"run.{key}={value.rstrip('/')}-chaos")
    config = load_config(path, given)
    if any(fault.kind.endswith("_environment") for fault in plan.fault):
        shown = config.environment.name or config.environment.entry.partition(":")[0]
        given += [f"environment.entry={WRAPPED}", f"environment.name={shown}"]
    return config, given


def _signal(due: _Due, parent: int) -> str:
    """Kill or stop one of the children; returns what was done, empty: none is there."""
    target, stop = str(due.fault.target), due.fault.kind == "stop"
    found = children(parent, target)
    if not found:
        return ""
    pid = due.chance.choice(found)
    if not send(pid, signal.SIGSTOP if stop else signal.SIGKILL):
        return ""
    if not stop:
        return f"{target} (process {pid}) was killed"

    def go_on() -> str:
        return f"{target} (process {pid}) " + ("goes on" if send(pid, signal.SIGCONT) else "has ended meanwhile")

    due.undo = go_on
    return f"{target} (process {pid}) was stopped for {due.fault.for_seconds:g} s"


def _end(process: Process | None) -> None:
    """Let nothing run on."""
    if process is not None and process.poll() is None:
        process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        finally:  # interrupted once more, too
            process.kill()
            process.wait()


def _refuse_without_target(config: Config, plan: Plan) -> None:
    """Raise ConfigError for faults that strike what this config does not start."""
    there: Mapping[str, tuple[bool, str]] = {
        "engine": (config.engine.launch == "embedded", "engine.urls names engines that somebody else has started"),
        "trainer": (config.trainer.kind == "embedded", 'trainer.kind = "external" is a program that somebody else has started'),
        "worker": (config.environment.workers > 0, "environment.workers is 0"),
    }
    for number, fault in enumerate(plan.fault, 1):
        started, why = there.get(fault.target or "", (True, ""))
        if not started:
            raise ConfigError(f"fault {number}: {fault.name}: this run starts no {fault.target}: {why}")


def _when(fault: Fault) -> str:
    times: dict[str, Any] = {"at_seconds": fault.at_seconds, "at_batch": fault.at_batch, "every_seconds": fault.every_seconds}
    return ", ".join(f"{name} = {value:g}" for name, value in times.items() if value is not None)
