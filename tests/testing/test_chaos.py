"""`headway chaos`: plans are refused like configs, faults strike what is there, and the verdict is that of the invariants."""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.cli.chaos import text_of
from headway.entries import load_entry
from headway.errors import ConfigError
from headway.formats.manifest import write_manifest
from headway.formats.run_directory import RunDirectory
from headway.protocols import Outcome
from headway.settings import EnvironmentSection
from headway.testing import Act, EngineScript, EnvironmentScript, Stage, TrainerScript, Turn, Violation
from headway.testing.chaos import Chaos, Fault, Plan, Verdict, load_plan, wrapped
from headway.testing.chaos.machine import children, give_back, hide, newest_version, send
from headway.testing.chaos.play import _Due
from headway.types import Prompt

NO_POLICY: Any = None  # of an attempt that asks for nothing

EXAMPLE = Path(__file__).parents[2] / "examples" / "guess"


def plan_of(tmp_path, text):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return load_plan(path)


def test_the_example_plan_is_a_plan_for_the_example():
    plan = load_plan(EXAMPLE / "chaos.toml")
    assert {fault.name for fault in plan.fault} >= {
        "kill orchestrator",
        "kill engine",
        "kill trainer",
        "kill worker",
        "stop trainer",
        "hide weights",
    }
    Chaos(EXAMPLE / "run.toml", plan, say=lambda _: None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it plans no fault"),
        ("[[fault]]\nkind = 'kill'\ntarget = 'engine'\nat_bach = 3", "fault 1: at_bach: no such key: did you mean at_batch?"),
        ("sede = 1\n[[fault]]\nkind = 'delete_weights'\nat_batch = 3", "sede: no such key: did you mean seed?"),
        ("[[fault]]\nkind = 'kil'\nat_batch = 3", "Invalid enum value 'kil'"),
        ("[[fault]]\nkind = 'kill'\nat_batch = 3", 'target is "": kind = "kill" needs one of engine, trainer, worker, orchestrator'),
        ("[[fault]]\nkind = 'stop'\ntarget = 'orchestrator'\nat_batch = 3", "needs one of engine, trainer, worker"),
        ("[[fault]]\nkind = 'hide_weights'\ntarget = 'engine'\nat_batch = 3", "target"),
        ("[[fault]]\nkind = 'delete_weights'", "no time given"),
        ("[[fault]]\nkind = 'delete_weights'\nat_batch = 1\nat_seconds = 2", "at_seconds and at_batch given"),
        ("[[fault]]\nkind = 'delete_weights'\nat_batch = -1", "fault 1"),
        ("[[fault]]\nkind = 'kill'\ntarget = 'engine'\nat_batch = 1\nfor_seconds = 3", 'for_seconds: kind = "kill" does not use it'),
        ("[[fault]]\nkind = 'stop'\ntarget = 'engine'\nevery_seconds = 4\nfor_seconds = 3", "at most half of every_seconds"),
        ("[[fault]]\nkind = 'failing_environment'\nat_batch = 1\nshare = 1.5", "fault 1"),
        ("seed = -1\n[[fault]]\nkind = 'delete_weights'\nat_batch = 1", "seed"),
        ("fault = 3", "it plans no fault"),
        ("fault = [3]", "must be a table"),
        ("[[fault", "cannot be read as TOML"),
    ],
)
def test_what_a_plan_does_not_mean_is_refused_by_name(tmp_path, text, said):
    with pytest.raises(ConfigError) as error:
        plan_of(tmp_path, text)
    assert said in str(error.value)
    assert "plan.toml" in str(error.value)


def test_every_mistake_of_a_plan_is_told(tmp_path):
    with pytest.raises(ConfigError) as error:
        plan_of(tmp_path, "sede = 1\n[[fault]]\nkind = 'kill'\nat_batch = 3\n[[fault]]\nkind = 'delete_weights'")
    assert [line.partition(": ")[2].split(":")[0] for line in [str(error.value), *error.value.detail.splitlines()]] == [
        "sede",
        "fault 1",
        "fault 2",
    ]


def test_a_missing_plan_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: no such file"):
        load_plan(tmp_path / "none.toml")


CONFIG = """
[run]
name = "job"
directory = "{directory}"
[model]
path = "model"
[prompts]
source = "world:prompts"
[environment]
entry = "world:attempt"
{more}
"""


@pytest.mark.parametrize(
    ("more", "target"),
    [('[engine]\nurls = ["http://127.0.0.1:1"]', "engine"), ('[trainer]\nkind = "external"', "trainer"), ("workers = 0", "worker")],
)
def test_a_target_that_the_config_does_not_start_is_refused(tmp_path, more, target):
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(directory="runs/{name}", more=more))
    plan = Plan(fault=(Fault(kind="kill", target=target, at_batch=1),))
    with pytest.raises(ConfigError, match=f"fault 1: kill {target}: this run starts no {target}"):
        Chaos(config, plan, say=lambda _: None)


@pytest.mark.parametrize(
    ("directory", "name", "found"),
    [
        ("runs/{name}", None, "runs/job-chaos"),
        ("runs/{name}", "storm", "runs/storm"),
        ("mine", None, "mine-chaos"),
        ("mine/", None, "mine-chaos"),
    ],
)
def test_the_run_never_lies_where_the_users_own_lies(tmp_path, directory, name, found):
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(directory=directory, more=""))
    chaos = Chaos(config, Plan(fault=(Fault(kind="delete_weights", at_batch=1),)), name=name, say=lambda _: None)
    assert chaos._run.path == Path(found).absolute()


def test_faults_come_once_at_their_batch_or_second_and_again_and_again_by_their_seed():
    once = _Due(Fault(kind="delete_weights", at_batch=3), random.Random(0))
    once.schedule(0.0)
    assert [once.is_due(9.0, batch) for batch in (-1, 2, 3, 7)] == [False, False, True, True]
    once.fired += 1
    assert not once.is_due(9.0, 7)
    at = _Due(Fault(kind="delete_weights", at_seconds=5.0), random.Random(0))
    at.schedule(0.0)
    assert [at.is_due(now, 99) for now in (4.9, 5.0)] == [False, True]
    at.fired += 1
    at.schedule(5.0)
    assert not at.is_due(100.0, 99)
    again = _Due(Fault(kind="delete_weights", every_seconds=10.0), random.Random(0))
    gaps = []
    now = 0.0
    for _ in range(50):
        again.schedule(now)
        assert again.at is not None
        gaps.append(again.at - now)
        now = again.at
        again.fired += 1
    assert 5 <= min(gaps) < 8 < 12 < max(gaps) <= 15


def test_a_child_is_found_by_what_it_runs_and_whose_it_is():
    code = "import sys, time; time.sleep(600)"
    decoy = subprocess.Popen([sys.executable, "-c", code, "-m", "headway.workers"])
    worker = subprocess.Popen([sys.executable, "-c", code, "-m", "headway.worker", "--wire", "3"])
    engine = subprocess.Popen([sys.executable, "-c", code, "-m", "headway", "engine", "--model", "x"])
    try:
        found = {kind: set(children(os.getpid(), kind)) for kind in ("worker", "engine", "trainer")}  # other tests may have some, too
        assert [worker.pid in found[kind] for kind in found] == [True, False, False]
        assert [engine.pid in found[kind] for kind in found] == [False, True, False]
        assert not any(decoy.pid in pids for pids in found.values())
        assert children(worker.pid, "worker") == []
        assert send(worker.pid, signal.SIGKILL)
        worker.wait()
        nobody = int(Path("/proc/sys/kernel/pid_max").read_text())  # the worker's own number may be somebody else's by now
        assert not send(nobody, signal.SIGKILL)
    finally:
        for process in (decoy, worker, engine):
            process.kill()
            process.wait()


def test_a_version_is_taken_away_and_given_back_unless_it_was_made_again(tmp_path):
    run = RunDirectory(tmp_path / "run")
    assert newest_version(run) is None
    for version in (0, 1, 2, 3):
        run.weight(version).mkdir(parents=True)
        if version < 3:  # the third is being written
            write_manifest(run.weight(version), kind="weights", lineage="x", id=version)
    assert newest_version(run) == 2
    hidden = hide(run, 2, tmp_path / "place")
    assert hidden is not None
    assert newest_version(run) == 1
    assert give_back(run, 2, hidden)
    assert newest_version(run) == 2
    hidden = hide(run, 2, tmp_path / "place")
    assert hidden is not None
    run.weight(2).mkdir()
    assert not give_back(run, 2, hidden)
    assert not hidden.exists()
    assert hide(run, 9, tmp_path / "place") is None


@pytest.fixture
def weather(tmp_path, monkeypatch):
    file = tmp_path / "weather.json"
    (tmp_path / "sunny_world.py").write_text("from headway import Outcome\nasync def attempt(prompt, policy):\n    return Outcome(1.0)\n")
    monkeypatch.setenv(wrapped.VARIABLE, str(file))
    monkeypatch.syspath_prepend(str(tmp_path))

    moments = itertools.count(1_000_000_000, 10)  # however coarse the times of a file system are, each is another

    def set_to(**values):
        file.write_text(json.dumps({"entry": "sunny_world:attempt", "base": str(tmp_path), **values}))
        moment = next(moments)
        os.utime(file, (moment, moment))

    return set_to


async def test_the_wrapped_environment_fails_as_often_as_the_plan_says_and_always_the_same_attempts(weather):
    async def failing():
        failed = []
        for number in range(200):
            try:
                assert await wrapped.attempt(Prompt(f"p{number}", 0, {}), NO_POLICY) == Outcome(1.0)
            except wrapped.ChaosError:
                failed.append(number)
        return failed

    weather()
    assert await failing() == []
    weather(failing_share=0.25, seed=3)
    hit = await failing()
    assert 30 < len(hit) < 70
    assert await failing() == hit
    weather(failing_share=0.25, seed=4)
    assert await failing() != hit


def test_the_wrapped_environment_is_one_that_workers_accept():
    entry = "headway.testing.chaos.wrapped:attempt"
    assert EnvironmentSection(entry=entry).entry == entry
    assert load_entry(entry, Path(), key="environment.entry") is wrapped.attempt


def test_the_verdict_says_what_was_done_what_broke_and_how_the_run_ended():
    clean = text_of(Verdict(Path("runs/x"), 0, ["  1.0 s: engine was killed"], [], []))
    assert clean.splitlines()[-1] == "clean: the run reached its end, and all ten invariants hold"
    broken = Verdict(Path("runs/x"), 1, [], ["kill engine (at_batch = 9)"], [Violation(5, "batch 3 was consumed twice")])
    assert not broken.is_clean
    for part in ("the run had ended before: kill engine (at_batch = 9)", "invariant 5: batch 3 was consumed twice", "exit code 1"):
        assert part in text_of(broken)
    assert not Verdict(Path("x"), 0, [], [], [], timed_out=True).is_clean


PLAN = """
seed = 2
limit_seconds = 200
[[fault]]
kind = "failing_environment"
at_seconds = 0
for_seconds = 200
share = 0.1
[[fault]]
kind = "kill"
target = "worker"
at_batch = 1
[[fault]]
kind = "kill"
target = "orchestrator"
at_batch = 2
[[fault]]
kind = "hide_weights"
at_batch = 4
for_seconds = 0.5
[[fault]]
kind = "kill"
target = "orchestrator"
at_batch = 1000
"""


def played(tmp_path, plan, **settings):
    """Play the chaos of a stage's config by the command line; returns stage and process."""
    (tmp_path / "plan.toml").write_text(plan)
    environment = EnvironmentScript(prompts=40, default=Act(turns=(Turn(max_tokens=5, observe="<"), Turn(max_tokens=5))))
    stage = Stage(
        tmp_path,
        name="run-chaos",
        engines=[EngineScript(token_seconds=0.005)],
        environment=environment,
        trainer=TrainerScript(step_seconds=0.7),  # faults strike while it runs
        settings={"run.steps": 7, "run.directory": str(tmp_path / "{name}"), **settings},
    )
    with stage:
        command = [sys.executable, "-m", "headway", "chaos", str(stage.config), "--plan", str(tmp_path / "plan.toml")]
        variables = {**os.environ, **stage.variables}
        return stage, subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.e2e
def test_a_run_under_faults_is_told_and_judged(tmp_path):
    stage, process = played(tmp_path, PLAN)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "clean: the run reached its end, and all ten invariants hold" in process.stdout
    for told in ("was killed", "10% of the attempts fail", "started again with --resume", "was hidden for 0.5 s"):
        assert told in process.stdout
    assert "the run had ended before: kill orchestrator (at_batch = 1000)" in process.stdout
    assert stage.info()["ended"]["code"] == 0
    assert {row["environment"] for row in _records(stage)} == {"headway.testing.environment"}


@pytest.mark.e2e
def test_a_run_that_does_not_end_in_time_has_failed(tmp_path):
    plan = 'limit_seconds = 8\n[[fault]]\nkind = "failing_environment"\nat_seconds = 0\nfor_seconds = 100\nshare = 1.0\n'
    endless = {"run.max_consecutive_failures": 0, "run.max_empty_batches": 100_000, "rollout.max_prompt_failures": 100_000}
    _, process = played(tmp_path, plan, **endless, **{"run.drain_timeout_seconds": 1})
    assert process.returncode == 1
    assert "the run did not end within the plan's limit_seconds" in process.stdout


@pytest.mark.e2e
def test_whoever_ends_the_play_ends_the_run_that_was_started_last(tmp_path, monkeypatch):
    plan = plan_of(tmp_path, 'limit_seconds = 100\n[[fault]]\nkind = "kill"\ntarget = "orchestrator"\nat_batch = 1\n')

    def say(line):
        if "started again" in line:
            raise BrokenPipeError  # who listens is gone

    trainer = TrainerScript(step_seconds=0.7)
    settings = {"run.steps": 1000, "run.directory": str(tmp_path / "{name}"), "run.drain_timeout_seconds": 1}
    environment = EnvironmentScript(prompts=5000)
    with Stage(tmp_path, name="run-chaos", environment=environment, trainer=trainer, settings=settings) as stage:
        for name, value in stage.variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(BrokenPipeError):
            Chaos(stage.config, plan, say=say).play()
        assert _running(str(stage.config)) == []
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".weather.json")] == []


def _running(argument):
    """Return the processes that were started with an argument."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if argument in (process / "cmdline").read_bytes().decode("utf-8", "replace").split("\0"):
                found.append(int(process.name))
    return found


def _records(stage):
    import pyarrow.parquet as pq

    return [row for batch in sorted((stage.run / "batches").iterdir()) for row in pq.read_table(batch / "rollouts.parquet").to_pylist()]
