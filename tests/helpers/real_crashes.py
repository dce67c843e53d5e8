"""Real runs under kill -9: processes, files and sockets as users have them, killed at random points, resumed, and held to account.

A `Target` is a run with everything around it: between fakes (fast), or with headway's own engine and trainer. `torment` kills what it is
told to, at moments that a seed draws; `die_at_commits` has the run end itself; `account` says what became of all that was durable.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ended_processes import has_ended
from lives import LifeBooks

from headway.adapters.journal.reader import read_events
from headway.errors import StorageError
from headway.events import Ended, Finished, Resumed
from headway.formats.run_directory import RunDirectory, numbered
from headway.settings import RolloutSection
from headway.testing import EngineScript, EnvironmentScript, Playing, Stage, TrainerScript, assert_run
from headway.types import OnStale

LIMIT = 240.0  # seconds for anything that must happen at all, on a machine that is busy with other things
VICTIMS = ("orchestrator", "orchestrator", "orchestrator", "engine", "trainer", "weights")  # "worker" where there are any
MOMENTS = ("start", "instant", "save", "save")
STEPS = 100_000
SECTION: dict[str, Any] = {"groups_per_batch": 2, "group_size": 2, "max_concurrent": 12, "max_staleness": 2, "steps_ahead": 1}
RUN = {"run.steps": STEPS, "prompts.epochs": 1, "environment.workers": 0, "run.max_consecutive_failures": 0}
INIT: dict[str, Any] = {
    "model.init.hidden_size": 16,
    "model.init.num_hidden_layers": 1,
    "model.init.num_attention_heads": 2,
    "model.init.num_key_value_heads": 2,
    "model.init.head_dim": 8,
    "model.init.intermediate_size": 16,
}

HELD_WORLD = """
import asyncio, os
from headway.testing import environment

async def attempt(prompt, policy):
    while os.path.exists({hold!r}) and os.path.exists({batch!r}):
        await asyncio.sleep(0.02)
    return await environment.attempt(prompt, policy)
"""


def until(condition, what, limit=LIMIT):
    deadline = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
        time.sleep(0.005)
    return found


class Target:
    """A run between fakes, which live on when it dies. `mode` is rollout.on_stale.

    `holds`: once that batch is on disk no rollout gets on until `go_on`, and at most one batch more is formed: the run cannot end before.
    """

    embedded = False

    def __init__(self, directory: Path, *, prompts: int, mode: OnStale = "mask", engines: int = 1, holds: int | None = None, **settings):
        directory.mkdir(parents=True, exist_ok=True)
        self.hold = directory / "hold"
        self.holds = None if holds is None else directory / "run" / "batches" / f"{holds:08d}"
        if holds is not None:
            (directory / "held_world.py").write_text(HELD_WORLD.format(hold=str(self.hold), batch=str(self.holds)))
            self.hold.touch()
            settings |= {"environment.entry": "held_world:attempt", "rollout.timeout_seconds": LIMIT}
        self.section = RolloutSection(on_stale=mode, **SECTION)
        keys = {f"rollout.{name}": value for name, value in SECTION.items()} | {"rollout.on_stale": mode}
        self.stage = Stage(
            directory,
            settings=RUN | keys | settings,
            engines=[EngineScript(token_seconds=0.015, load_seconds=0.02)] * engines,
            environment=EnvironmentScript(prompts=prompts),
            trainer=TrainerScript(step_seconds=0.1, shard_seconds=0.02),
        )
        self.run = self.stage.run
        self.playing: Playing | None = None
        self.exit_code = 0
        self.trainer_waits = False

    def __enter__(self):
        self.stage.__enter__()
        return self

    def __exit__(self, *error):
        self.stage.__exit__(*error)

    @property
    def alive(self):
        return self.playing is not None and not self.playing.has_ended

    @property
    def stands_still(self):
        """Whether it is held, and its end is near: no new batch need come."""
        return self.holds is not None and self.hold.exists() and self.holds.exists()

    def go_on(self):
        """Hold nothing any more."""
        self.hold.unlink(missing_ok=True)

    def begin(self):
        """Start the run, or take it up; a trainer whose weights were lost comes after it, and hears of the new lineage."""
        taken_up = self.resumes()
        self.playing = self.stage.start(resume=True)
        if self.trainer_waits:
            until(lambda: not self.alive or self.resumes() > taken_up, "the run is taken up")
            self.stage.trainer.start()
            self.trainer_waits = False

    def resumes(self):
        return sum(isinstance(event, Resumed) for event in durable(self)) if self.trainer_waits else 0

    def children(self, word):
        found = []
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.playing.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if word in " ".join(child.cmdline()):
                        found.append(child)
        return found

    def kill(self, victim, draw):
        """Kill the victim, and start it again if nobody else does; whether it was there."""
        match victim:
            case "orchestrator":
                self.playing.kill()
            case "weights":
                self.playing.kill()
                self.lose_weights(draw.choice([1, 1, 2]))
            case "engine":
                engine = draw.choice(self.stage.engines)
                engine.kill()
                engine.start()
            case "trainer":
                self.stage.trainer.kill()
                self.stage.trainer.start()  # never while it waits: the run is up
            case "worker":
                return self.kill_child("headway.worker")
        return True

    def kill_child(self, word):
        until(lambda: not self.alive or self.children(word), f"{word} is there")
        children = self.children(word)
        for child in children[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        return bool(children)

    def lose_weights(self, count):
        """As a disk does that came back older than it was."""
        self.stage.trainer.kill()
        run = RunDirectory(self.run)
        for version in sorted(numbered(run.weights))[-count:]:
            for lost in (run.weight(version), run.trainer_state(version)):
                shutil.rmtree(lost, ignore_errors=True)
        self.trainer_waits = True

    def end(self):
        ended = self.playing.end(limit=LIMIT)
        self.exit_code = ended.code
        return ended

    def check(self):
        """The ten invariants."""
        stage = self.stage
        logs = {"engine_logs": stage.engine_logs, "trainer_logs": [stage.trainer.log_path], "environment_logs": [stage.environment_log]}
        assert_run(self.run, **logs, exit_code=self.exit_code)


class Embedded(Target):
    """A run with headway's own engine and trainer, which are its children: they end with it, and it starts them again."""

    embedded = True

    def __init__(self, directory: Path, *, prompts: int, mode: OnStale = "mask", **settings):
        keys: dict[str, Any] = {
            "trainer.kind": "embedded",
            "trainer.learning_rate": 1e-3,
            "trainer.device": "cpu",
            "engine.max_restarts": 10,
        }
        super().__init__(directory, prompts=prompts, mode=mode, **INIT, **keys, **settings)

    def __enter__(self):
        settings = {name: value for name, value in self.stage._settings.items() if name != "model.path"}
        self.stage._settings = settings
        self.stage.engines = []
        self.stage.write_config()
        text = self.stage.config.read_text().splitlines()
        self.stage.config.write_text("\n".join(line for line in text if not line.startswith("urls")) + "\n")
        return self

    def __exit__(self, *error):
        for run in self.stage.runs:
            run.kill()

    def kill(self, victim, draw):
        if victim in {"engine", "trainer"}:
            return self.kill_child(f"headway {victim}")
        if victim in {"orchestrator", "weights"}:
            children = self.children("headway")
            self.playing.kill()
            until(lambda: all(map(has_ended, children)), "the children end")
            if victim == "weights":
                self.lose_weights(draw.choice([1, 1, 2]))
            return True
        return super().kill(victim, draw)

    def lose_weights(self, count):
        run = RunDirectory(self.run)
        for version in sorted(numbered(run.weights))[1:][-count:]:
            for lost in (run.weight(version), run.trainer_state(version)):
                shutil.rmtree(lost, ignore_errors=True)

    def check(self):
        assert_run(self.run, environment_logs=[self.stage.environment_log], exit_code=self.exit_code)


# -------------------------------------------------------------------------------------------------------------------------------- killing

NOT_UP = "ended before it was ready"


@dataclass
class Told:
    """What became of a run: by victim how many kills, of the durable what was kept and what was not, by cause."""

    kills: Counter = field(default_factory=Counter)
    became: Counter = field(default_factory=Counter)
    lines: list = field(default_factory=list)


def durable(target):
    """The events that are durable now; none before there is a journal."""
    try:
        run_id = RunDirectory(target.run).run_json.read_bytes()
    except FileNotFoundError:
        return []
    with contextlib.suppress(StorageError):
        return list(read_events(target.run / "state", run_id=json.loads(run_id)["id"]))
    return []


def staging(target):
    """Directories that are being written now."""
    found = []
    for parent in ("batches", "weights", "trainer"):
        with contextlib.suppress(FileNotFoundError):
            found += [path.name for path in (target.run / parent).glob(".tmp-*")]
    return found


def wait_for(moment, target, draw):
    """Wait for the moment of a kill, until the run stands still, or for its end; say which it was, in words."""
    started = time.monotonic()

    def over():
        return not target.alive or target.stands_still

    if moment == "start":
        seconds = draw.uniform(0.0, 8.0 if target.embedded else 3.0)
        until(lambda: not target.alive or time.monotonic() - started > seconds, "a while passes")
        return f"{seconds:.2f} s after the start"
    batches = len(numbered(RunDirectory(target.run).batches))
    until(lambda: over() or len(numbered(RunDirectory(target.run).batches)) > batches, "a new batch")
    if moment == "save":
        until(lambda: over() or staging(target), "something is written")
        return "while something is written" if staging(target) or not target.stands_still else "while it stands still"
    seconds, since = draw.uniform(0.0, 1.0), time.monotonic()
    until(lambda: not target.alive or time.monotonic() - since > seconds, "a while passes")
    return f"{seconds:.2f} s after a new batch"


def torment(target, seed, points, *, victims=VICTIMS, moments=MOMENTS, tell=lambda line: None):
    """Kill so often, resume after each, and let the run end; nothing durable may vanish on the way."""
    draw = random.Random(seed)
    told = Told()
    known, struck = [], False  # whether something was killed since the run was started last
    for point in range(points):
        if not target.alive:
            target.begin()
            struck = False
        victim, moment = draw.choice(victims), draw.choice(moments)
        where = wait_for(moment, target, draw)
        if not target.alive:
            ended = target.end()
            if struck and NOT_UP in ended.last_error:
                continue  # it was killed as it started, which ends a run that starts: it is taken up again
            assert ended.code == 0, ended.err[-3000:]
            break
        if not target.kill(victim, draw):
            continue
        struck = True
        events = durable(target) if victim in {"orchestrator", "weights"} else known
        assert events[: len(known)] == known, "what was durable has vanished from the journal"
        known = events
        told.kills[victim] += 1
        version = max(numbered(RunDirectory(target.run).weights), default=0)
        line = f"seed {seed} point {point}: {victim} {where}; version {version}, {len(known)} events durable"
        told.lines.append(line)
        tell(line)
    target.go_on()
    if not target.alive:
        target.begin()
        struck = False
    ended = target.end()
    if struck and NOT_UP in ended.last_error:
        target.begin()
        ended = target.end()
    assert ended.code == 0, ended.err[-3000:]
    told.became += account(target, known)
    return told


def account(target, known=()):
    """Hold a run that has ended against the promises; return what became of what was live when it was killed."""
    events = durable(target)
    assert events[: len(known)] == list(known), "what was durable has vanished from the journal"
    books = LifeBooks(target.section, STEPS)
    for event in events:
        books.read(event)
    assert isinstance(events[-1], Ended)
    assert (books.running, books.interrupted) == (set(), set())
    assert len(books.births) == len(books.shipped) + len(books.dropped) + len(books.ready), "a group has no ending, or two"
    trained = Counter(books.prompts[group] for k, groups in books.batches.items() if k < books.trained for group in groups)
    assert not [prompt for prompt, count in trained.items() if count > 1], "a prompt was trained twice"
    finished = {(event.group, event.member) for event in events if isinstance(event, Finished)}
    lost = {group for group, _ in finished if group in books.dropped and books.dropped[group] == "interrupted"}
    assert not lost, f"finished rollouts of groups {lost} are lost"
    target.check()
    assert not staging(target), "litter of killed writers is left"
    return Counter(
        {
            "lives": 1 + sum(isinstance(event, Resumed) for event in events),
            "batches trained": books.trained,
            "prompts trained": len(trained),
            "prompts given up": len(books.ended_well.keys() - trained.keys()),
            "groups continued": books.continued,
            "groups interrupted": sum(cause == "interrupted" for cause in books.dropped.values()),
            "finished rollouts": len(finished),
            **{f"groups evicted: {cause}": count for cause, count in books.evicted.items()},
        }
    )


def die_at_commits(target, commits, *, tell=lambda line: None):
    """Take a run up again and again; the process ends itself before and after its n-th commit, for each n given. Then let it end."""
    told = Told()
    known = []
    for commit in commits:
        for before in (True, False):
            code = _run_and_die(target, commit, before=before)
            assert code in {0, -9}, (target.stage.directory / "died.err").read_text()[-3000:]
            if code == 0:
                break
            events = durable(target)
            assert events[: len(known)] == known, "what was durable has vanished from the journal"
            known = events
            told.kills["orchestrator"] += 1
            told.lines.append(f"orchestrator {'before' if before else 'after'} its commit {commit}; {len(known)} events durable")
            tell(told.lines[-1])
    target.begin()
    ended = target.end()
    if NOT_UP in ended.last_error:
        target.begin()
        ended = target.end()
    assert ended.code == 0, ended.err[-3000:]
    told.became += account(target, known)
    return told


def _run_and_die(target, commit, *, before):
    launcher = Path(__file__).parents[1] / "crash" / "run_and_die.py"
    command = [sys.executable, str(launcher), str(commit), "before" if before else "after", "run", str(target.stage.config), "--resume"]
    environment = {**os.environ, **target.stage.variables}
    options = {"cwd": target.stage.directory, "env": environment, "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    with (target.stage.directory / "died.err").open("w") as err:
        return subprocess.run(command, stderr=err, check=False, timeout=LIMIT, **options).returncode
