"""Whole runs whose engines are launched vLLM servers (stand-ins that parse the flags): they serve, die, come back and are gone."""

import os
import signal
import socket
import stat
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ended_processes import has_ended
from held_ports import held_ports
from held_runs import go_on, hold
from stand_in_servers import MARK, living, started, until, write_stand_ins

from headway.testing import EnvironmentScript, Stage
from headway.testing.log import read_log

pytestmark = pytest.mark.e2e

SLOW = EnvironmentScript(prompts=400)
KEYS = {"model", "served_model_name", "host", "dtype", "max_num_seqs", "logprobs_mode", "enable_scale_out", "middleware"}


class Launching(Stage):
    """A stage without engines of its own: the run launches them."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.standing = write_stand_ins(directory / "packages")
        self.mark = uuid.uuid4().hex
        given = {
            "engine.launch": "vllm",
            "engine.count": 2,
            "engine.environment": [f"PYTHONPATH={self.standing}", f"STAND_IN_LOG={directory}", "FROM_CONFIG=yes"],
            "engine.start_timeout_seconds": 120,
            "run.shutdown_seconds": 20,
        }
        super().__init__(directory, settings=given | settings, engines=(), environment=SLOW)

    def start(self, *settings: str, **options: Any) -> Any:
        variables = {MARK: self.mark} | options.pop("variables", {})
        return super().start(*settings, variables=variables, **options)

    @property
    def servers(self) -> list[dict[str, Any]]:
        return started(self.directory)

    @property
    def engine_logs(self) -> list[Path]:
        return sorted(self.directory.glob("engine-*.jsonl"))

    def server(self, index: int) -> psutil.Process:
        """The newest server process on the port of an engine."""
        ports = list(dict.fromkeys(server["port"] for server in self.servers))
        return psutil.Process([server["pid"] for server in self.servers if server["port"] == ports[index]][-1])

    def all_gone(self) -> None:
        """Nothing that the run has started is left."""
        until(lambda: not living(self.mark), "nothing is left of the run")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Launching]:
    with Launching(tmp_path) as made:
        try:
            yield made
        finally:
            for run in made.runs:
                run.kill()
            for process in living(made.mark):
                process.kill()


def test_a_run_launches_two_servers_and_both_serve_it(stage: Launching) -> None:
    stage.write_config(run__steps=8, engine__arguments=["--seed", "7"], engine__max_context_tokens=512, engine__visible_devices=["0", "1"])
    ended = stage.play()
    assert ended.code == 0, ended.err
    stage.check(ended)
    stage.all_gone()
    servers = stage.servers
    assert len(servers) == len({server["port"] for server in servers}) == 2
    for server in servers:
        assert server.keys() >= KEYS
        assert (server["host"], server["served_model_name"], server["max_model_len"], server["seed"]) == ("127.0.0.1", "policy", "512", "7")
        assert (server["logprobs_mode"], server["enable_scale_out"], server["enable_lora"]) == ("processed_logprobs", True, False)
        assert server["argv"][-2:] == ["--seed", "7"]  # the user's come last
        environment = server["environment"]
        told = {name: environment[name] for name in ("VLLM_SERVER_DEV_MODE", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "FROM_CONFIG")}
        assert told == {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "FROM_CONFIG": "yes"}
        key = environment["VLLM_API_KEY"]
        assert len(key) == 64
        assert not any(key in part for part in server["command"])  # which everybody can read
    assert {server["environment"]["CUDA_VISIBLE_DEVICES"] for server in servers} == {"0", "1"}
    for log in stage.engine_logs:
        entries = read_log(log)
        asked = [entry for entry in entries if entry["what"] == "asked" and entry["path"] != "/health"]  # by the guard, to whom it is open
        assert {entry["authorization"] for entry in asked} == {f"Bearer {key}"}
        assert sum(entry["what"] == "arrived" for entry in entries) > 10
        first = next(entry for entry in entries if entry["what"] == "arrived")
        assert first["request_id"] == "warm-up"
    for index in range(2):
        log = stage.run / "logs" / f"engine-{index}.log"
        assert "loading weights of" in log.read_text()
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        assert key not in log.read_text()
    assert key not in (stage.run / "events.log").read_text()


def test_kill_9_of_one_of_two_servers_and_the_run_goes_on(stage: Launching) -> None:
    stage.write_config(run__steps=20)
    hold(stage, 10)
    stage.start()
    stage.until_batch(3)
    stage.server(0).kill()
    stage.until(lambda: len(stage.servers) == 3, what="it is started again")
    go_on(stage)
    ended = stage.runs[-1].end()
    assert ended.code == 0, ended.err
    stage.check(ended)
    stage.all_gone()
    assert stage.servers[2]["port"] in {server["port"] for server in stage.servers[:2]}
    assert Path(stage.servers[2]["model"]).parent == stage.run / "weights"  # what is served, not what the run began with
    assert "ended unexpectedly (killed by SIGKILL)" in (stage.run / "events.log").read_text()
    assert stage.rows("pipeline.jsonl")[-1]["engine_restarts"] == 1


def test_one_that_is_given_up_is_gone_without_and_the_last_one_ends_the_run(stage: Launching) -> None:
    stage.write_config(run__steps=100000, engine__max_restarts=0)
    run = stage.start()
    stage.until_batch(1)
    stage.server(1).kill()
    until(lambda: "It is given up; the run goes on with 1 of 2" in (stage.run / "events.log").read_text(), "one is given up")
    formed = len(list((stage.run / "batches").iterdir()))
    stage.until_batch(formed + 4)
    stage.server(0).kill()
    ended = run.end()
    assert ended.code == 1
    assert ended.last_error.endswith("[engine]")
    stage.all_gone()  # what it has left is not judged: an engine may have been killed in the middle of a sync, paused


def test_kill_9_of_a_guard_takes_its_server_along_and_both_come_back(stage: Launching) -> None:
    stage.write_config(run__steps=20)
    hold(stage, 10)
    stage.start()
    stage.until_batch(3)
    before = stage.server(1)
    before.parent().kill()
    stage.until(lambda: len(stage.servers) == 3, what="it is started again")
    stage.until(lambda: has_ended(before), what="its server is gone")
    go_on(stage)
    ended = stage.runs[-1].end()
    assert ended.code == 0, ended.err
    stage.all_gone()


def test_a_server_that_dies_at_the_start_ends_the_run_with_the_end_of_its_log(stage: Launching) -> None:
    ended = stage.play(variables={"STAND_IN_ACT": "die"})
    assert ended.code == 1
    assert "ended before it was ready (exit code 1): ValueError: no kernel for head_dim 16; its log: " in ended.last_error
    assert "loading weights of" in ended.err
    assert "in main" in ended.err  # of the server's traceback
    stage.all_gone()


def test_flags_that_a_server_does_not_know_are_bad_input(stage: Launching) -> None:
    ended = stage.play('engine.arguments=["--no-such-flag"]')
    assert ended.code == 2
    assert "error: unrecognized arguments: --no-such-flag" in ended.last_error
    stage.all_gone()


def test_a_server_that_is_never_ready_is_given_up_after_its_limit(stage: Launching) -> None:
    ended = stage.play("engine.start_timeout_seconds=10", variables={"STAND_IN_ACT": "never"})
    assert ended.code == 1
    assert "was not ready within 10 s; its log: " in ended.last_error
    assert "loading weights of" in ended.err
    stage.all_gone()


def test_a_python_that_is_none_and_one_without_vllm_are_bad_input(stage: Launching) -> None:
    ended = stage.play("engine.python=nowhere/bin/python")
    assert ended.code == 2
    assert f'engine.python is "{stage.directory}/nowhere/bin/python": no such program' in ended.last_error
    ended = stage.play("engine.environment=[]")
    assert ended.code == 2
    assert f"{sys.executable} finds no vllm: install it, or name a Python that has it in engine.python" in ended.last_error
    assert not stage.run.exists()
    assert not stage.servers


def test_the_python_of_another_environment_is_found_relative_to_the_config(stage: Launching) -> None:
    program = stage.directory / "elsewhere" / "python"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nTHAT_ONE=yes exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    ended = stage.play("engine.python=elsewhere/python", "run.steps=2")
    assert ended.code == 0, ended.err
    assert [server["environment"]["THAT_ONE"] for server in stage.servers] == ["yes", "yes"]


def test_kill_9_of_the_orchestrator_while_servers_start_leaves_nothing_behind(stage: Launching) -> None:
    run = stage.start(variables={"STAND_IN_ACT": "never"})
    stage.until(lambda: len(stage.servers) == 2, what="both are started")
    run.kill()
    stage.all_gone()


def test_kill_9_of_the_orchestrator_and_the_next_one_launches_at_the_same_ports(stage: Launching) -> None:
    with held_ports(2) as first:
        stage.write_config(run__steps=100000, engine__port=first)
        run = stage.start()
        stage.until_batch(1)
        stage.until_version(1)  # what the next one goes on from, at least
        run.kill()
        formed = len(list((stage.run / "batches").glob("0*")))
        ended = stage.play(f"run.steps={formed + 10}", resume=True)  # at once: the servers of before are about to end
    assert ended.code == 0, ended.err
    stage.check(ended)
    stage.all_gone()
    ports = [server["port"] for server in stage.servers]
    assert (len(ports), len(set(ports))) == (4, 2)
    assert all(Path(server["model"]).parent == stage.run / "weights" for server in stage.servers[2:])


@pytest.mark.parametrize("when", ["starting", "running"])
def test_a_signal_ends_all_servers_those_that_ignore_it_too(stage: Launching, when: str) -> None:
    stage.write_config(run__steps=100000, run__drain_timeout_seconds=2)
    run = stage.start(variables={"STAND_IN_ACT": "never" if when == "starting" else "stubborn"})
    if when == "running":
        stage.until_batch(1)
    else:
        stage.until(lambda: len(stage.servers) == 2, what="both are started")
    run.signal(signal.SIGTERM)
    ended = run.end()
    assert ended.code == 143, ended.err
    assert "not closed within" not in ended.err
    stage.all_gone()


def test_a_port_that_is_taken_is_bad_input_and_given_ports_follow_each_other(stage: Launching) -> None:
    with held_ports(2) as first:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", first + 1))
            listener.listen()
            ended = stage.play(f"engine.port={first}")
        assert ended.code == 2
        assert f"port {first + 1}" in ended.last_error
        assert not stage.servers
        ended = stage.play(f"engine.port={first}", "run.steps=2")
    assert sorted(server["port"] for server in stage.servers) == [first, first + 1], ended.err


def test_a_run_launches_an_sglang_and_its_key_is_in_no_command_line(stage: Launching) -> None:
    ended = stage.play('engine.launch="sglang"', "engine.count=1", "run.steps=4", 'engine.dtype="bfloat16"')
    assert ended.code == 0, ended.err
    stage.check(ended)
    stage.all_gone()
    [server] = stage.servers
    assert (server["host"], server["dtype"], server["enable_metrics"], len(server["api_key"])) == ("127.0.0.1", "bfloat16", True, 64)
    assert not any(server["api_key"] in part for part in server["command"])
    paths = {entry["path"] for log in stage.engine_logs for entry in read_log(log) if entry["what"] == "arrived"}
    assert paths == {"/generate"}


def test_the_key_that_the_user_names_is_the_servers(stage: Launching) -> None:
    ended = stage.play("engine.api_key_variable=MY_KEY", "engine.count=1", "run.steps=2", variables={"MY_KEY": "a-key-of-mine"})
    assert ended.code == 0, ended.err
    assert [server["environment"]["VLLM_API_KEY"] for server in stage.servers] == ["a-key-of-mine"]
    assert os.environ.get("VLLM_API_KEY") is None
