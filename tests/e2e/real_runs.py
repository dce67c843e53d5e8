"""Real runs for tests: `headway run` as a person starts it, with an engine and a trainer attached that need no torch of their own.

A `Bench` starts runs; each is a process whose environment carries a mark, which everything it starts inherits: who carries the mark when
the run has ended has been left behind. `audit` reads what a run left on disk, with the libraries that a reader would use.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
from safetensors.numpy import load_file

from headway.adapters.journal.sqlite import SqliteJournal
from headway.events import AnyEvent
from headway.rules.ledger import Ledger, apply
from headway.testing import assert_run

HEADWAY = [sys.executable, "-m", "headway"]
EXTERNAL_TRAINER = Path(__file__).parents[2] / "examples" / "external_trainer" / "trainer.py"
MARK = "HEADWAY_TEST_MARK"
LIMIT = 600.0  # seconds: for what must happen at all, on a machine that is busy with other things

INIT = "{hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, num_key_value_heads = 2, head_dim = 8, intermediate_size = 16}"

CONFIG = """
[run]
steps = 3
drain_timeout_seconds = 120
directory = "{name}"
[rollout]
groups_per_batch = 3
group_size = 4
max_concurrent = 24
max_staleness = 2
steps_ahead = 1
max_tokens = 1
timeout_seconds = 600
[prompts]
source = "world:prompts"
[environment]
entry = "world:attempt"
cleanup_seconds = 1
[trainer]
learning_rate = 1e-3
keep_checkpoints = 2
"""

WORLD = '''
import asyncio, itertools, os, subprocess, sys, time
from headway import Outcome

calls = itertools.count()
HERE = os.path.dirname(os.path.abspath(__file__))

def prompts():
    return [{"id": f"p{n}"} for n in range(10)]

def is_held():
    """Whether the test has asked that nothing ends once the batch is there that it has named."""
    try:
        with open(f"{HERE}/hold") as named:
            return os.path.exists(f"{HERE}/run/batches/{named.read()}")
    except FileNotFoundError:
        return False

async def play(policy):
    """Two turns; a reward that varies."""
    game = await policy.open("<bos>?")
    first = await game.generate(max_tokens=1)
    while is_held():
        await asyncio.sleep(0.05)
    game.observe("<")
    second = await game.generate(max_tokens=1)
    return (first.token_ids[0] + second.token_ids[0]) % 5 / 5

async def attempt(prompt, policy):
    return Outcome(await play(policy))

async def slow(prompt, policy):
    reward = await play(policy)
    await asyncio.sleep(0.2)
    return Outcome(reward)
'''


def until(condition: Callable[[], Any], *, limit: float = LIMIT, what: str | Callable[[], str] = "") -> None:
    """Wait for something that other processes bring about: they raise no event here."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit:g} s: {(what() if callable(what) else what) or condition}"
        time.sleep(0.02)


@dataclass(frozen=True)
class Ended:
    """How a run ended, for whoever started it."""

    code: int
    out: str
    err: str
    run: Run

    @property
    def last_error(self) -> str:
        """The line that says what went wrong."""
        return next(line for line in reversed(self.err.splitlines()) if line.startswith("headway: "))

    @property
    def recorded(self) -> dict[str, Any]:
        """What run.json says of the end."""
        ended: dict[str, Any] = self.run.info()["ended"]
        return ended

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a JSONL file of the run, read strictly."""
        return self.run.rows(name)


class Run:
    """A run under way."""

    def __init__(self, process: subprocess.Popen[str], directory: Path, mark: str, trainer: subprocess.Popen[bytes] | None) -> None:
        self.process = process
        self.directory = directory
        self._mark = mark
        self._trainer = trainer

    def info(self) -> dict[str, Any]:
        """run.json."""
        info: dict[str, Any] = json.loads((self.directory / "run.json").read_bytes())
        return info

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows that a JSONL file holds now, read strictly; the last line may be being written, and a missing file has none."""
        path = self.directory / name
        lines = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
        return [json.loads(line, parse_constant=_no_constant) for line in lines]

    def marked(self, word: str = "") -> list[psutil.Process]:
        """Processes that this run has started, directly or not, and that still live; `word` is in their command line."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() == psutil.STATUS_ZOMBIE or process.environ().get(MARK) != self._mark:
                    continue
                if word in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def child(self, word: str) -> psutil.Process:
        """The one child whose command line holds `word`."""
        [child] = [process for process in self.marked(word) if process.pid != self.process.pid]
        return child

    def until_batch(self, k: int) -> None:
        """Wait until batch `k` is on disk."""
        until(lambda: (self.directory / "batches" / f"{k:08d}").exists() or self.process.poll() is not None, what=f"batch {k}")
        assert self.process.poll() is None, self.process.communicate()

    def until_row(self, condition: Callable[[dict[str, Any]], Any], *, what: str) -> None:
        """Wait until the newest row of the pipeline is as the condition asks."""
        until(lambda: any(map(condition, self.rows("pipeline.jsonl")[-1:])) or self.process.poll() is not None, what=what)
        assert self.process.poll() is None, self.process.communicate()

    def until_gone(self) -> None:
        """Wait until nothing is left of the run: 10 s, on a machine that is not shared."""
        left: list[psutil.Process] = []

        def gone() -> bool:
            left[:] = self.marked()
            return not left

        until(gone, what=lambda: f"left behind: {list(map(str, left))}")

    def end(self, *, sabotaged: bool = False) -> Ended:
        """Wait for the end; nothing may be left behind, and nobody may see a traceback of ours.

        The ten invariants hold of what it has left (`headway.testing.assert_run`), unless the test has `sabotaged` the run's own files.
        """
        try:
            out, err = (text or "" for text in self.process.communicate(timeout=LIMIT))
            self.until_gone()
        finally:
            self.kill()
        assert "headway/orchestrator.py" not in err, err
        if not sabotaged and self.process.returncode != 2 and (self.directory / "run.json").exists():  # 2: another run's, or none
            assert_run(self.directory, exit_code=self.process.returncode)
        return Ended(self.process.returncode, out, err, self)

    def kill(self) -> None:
        """End everything, whatever state it is in."""
        for process in self.marked():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.communicate()
        if self._trainer is not None:
            self._trainer.kill()
            self._trainer.wait()


class Bench:
    """Starts runs in a directory of a test's own, against the engine and the checkpoint that all tests share."""

    def __init__(self, directory: Path, *, url: str, checkpoint: Path) -> None:
        self.directory = directory
        self.url = url
        self.checkpoint = checkpoint
        self.config = directory / "run.toml"
        self.runs: list[Run] = []
        self._attached = [f'engine.urls=["{url}"]', f"model.path={checkpoint}", 'trainer.kind="external"']
        self.config.write_text(CONFIG)
        self.world()

    def world(self, code: str = "") -> None:
        """Add to the module that the config names for prompts and environment."""
        (self.directory / "world.py").write_text(WORLD + code)

    def hold(self, k: int) -> None:
        """Have the run `run` stand still once batch `k` is on disk, until `go_on`: at most one more is formed, however late the test is.

        A rollout waits after its first turn, where the world's `play` is what it plays.
        """
        (self.directory / "hold.new").write_text(f"{k:08d}")
        (self.directory / "hold.new").replace(self.directory / "hold")

    def go_on(self) -> None:
        """Hold nothing any more."""
        (self.directory / "hold").unlink()

    def command(self, name: str, *settings: str) -> list[str]:
        """The command line of `headway run` or `check` with `--set` for each setting."""
        return [*HEADWAY, name, str(self.config), *(part for setting in settings for part in ("--set", setting))]

    def start(
        self,
        *settings: str,
        attached: bool = True,
        name: str = "run",
        at: Path | None = None,
        in_directory: str = "",
        closed: bool = False,
        environment: Mapping[str, str] = {},
        **streams: Any,
    ) -> Run:
        """Start `headway run` with `--set` for each setting, in directory `at` (unset: beside the config); `closed`: without streams."""
        at = at or self.directory
        directory = at / (in_directory or "{name}").replace("{name}", name)
        arguments = [*settings, f"run.name={name}", *([f"run.directory={in_directory}"] if in_directory else [])]
        arguments += self._attached if attached else [f"model.init={INIT}"]
        command = self.command("run", *arguments)
        if closed:
            command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
        mark = uuid.uuid4().hex
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
        variables = {**os.environ, **environment, MARK: mark}
        process = subprocess.Popen(command, cwd=at, env=variables, text=True, start_new_session=True, **streams)
        trainer = None
        if attached:
            trainer_command = [sys.executable, str(EXTERNAL_TRAINER), str(directory), str(self.checkpoint)]
            trainer = subprocess.Popen(trainer_command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        run = Run(process, directory, mark, trainer)
        self.runs.append(run)
        return run

    def play(self, *settings: str, **options: Any) -> Ended:
        """Run to the end."""
        return self.start(*settings, **options).end()

    def check(self, *settings: str) -> subprocess.CompletedProcess[str]:
        """`headway check`."""
        return subprocess.run(
            self.command("check", *settings), cwd=self.directory, capture_output=True, text=True, timeout=LIMIT, check=False
        )

    def close(self) -> None:
        """End what still runs."""
        for run in self.runs:
            run.kill()


def interrupt(run: Run, number: signal.Signals = signal.SIGINT) -> None:
    """Send a signal to the orchestrator alone, as a terminal or a supervisor does."""
    run.process.send_signal(number)


def audit(ended: Ended, *, max_staleness: float) -> Ledger:
    """Hold what a run left behind against itself; return the ledger that its journal gives.

    The bound: no contributing token is staler than `max_staleness`, by the stamps of the Parquet file and by the trainer's arrays, which
    say the same. The books: the journal replays without contradiction, what it calls a batch is on disk, and nothing is in flight.
    """
    directory = ended.run.directory
    for name in ("metrics.jsonl", "pipeline.jsonl"):
        ended.rows(name)
    rows = ended.rows("metrics.jsonl")
    batches = sorted((directory / "batches").iterdir())
    assert [row["batch"] for row in rows] == [int(batch.name) for batch in batches] == list(range(len(batches)))
    for row, batch in zip(rows, batches, strict=True):
        k = int(batch.name)
        stale = _staleness(k, pq.read_table(batch / "rollouts.parquet").to_pylist())
        arrays = load_file(batch / "batch.safetensors")
        versions = arrays["versions"][arrays["loss_mask"] == 1]
        contributing = k - versions[versions >= 0]  # replayed and external rollouts have none
        assert versions.size == row["contributing_tokens"] > 0
        assert versions.size - contributing.size == row["replayed_tokens"]
        if contributing.size:
            assert 0 <= contributing.min() <= contributing.max() == row["token_staleness_max"] <= max_staleness
        assert sorted(contributing) == sorted(stale[stale <= max_staleness])
        assert np.isfinite(arrays["logprobs"]).all()
        assert np.isfinite(arrays["advantages"]).all()
    ledger = Ledger()
    for event in history(ended):
        apply(ledger, event)
    assert ledger.next_batch == len(batches)
    assert not ledger.running
    assert ledger.rollouts_in_flight == 0
    taken = sum(row["groups"] - row["replayed_groups"] for row in rows)
    assert ledger.admitted == taken + len(ledger.ready) + sum(ledger.dropped.values())
    return ledger


def _staleness(k: int, rollouts: Sequence[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """Return the staleness of every token that could be in the loss, from the stamps: a span begins at the n-th sampled token."""
    stale: list[int] = []
    for rollout in rollouts:
        if rollout["source"] != "live":
            continue
        for sample in rollout["samples"]:
            lengths = {len(sample[name]) for name in ("token_ids", "sampled_mask", "loss_mask", "logprobs")}
            assert len(lengths) == 1
            sampled = sum(sample["sampled_mask"])
            starts = [*sample["span_start"], sampled]
            assert starts[0] == 0
            assert starts == sorted(set(starts))
            versions = np.repeat(sample["span_version"], np.diff(starts))
            in_loss = np.array(sample["loss_mask"])[np.array(sample["sampled_mask"])]
            if rollout["advantage"] is not None:
                stale.extend(k - versions[in_loss])
    return np.array(stale)


def history(ended: Ended) -> list[AnyEvent]:
    """Return every event of the run's journal."""

    async def read() -> list[AnyEvent]:
        journal = SqliteJournal(ended.run.directory / "state", run_id=ended.run.info()["id"])
        try:
            return list(journal.replay())
        finally:
            await journal.close()

    return asyncio.run(read())


def _no_constant(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")
