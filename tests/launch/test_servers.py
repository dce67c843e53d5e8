"""How each kind of engine is started: commands, environments, and what keeps one from being started."""

import sys
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.launch.beside_vllm.headway_access import AskForKey
from headway.launch.servers import check_servers, kind_of, launch_of, python_of
from headway.settings import Config, EngineSection, EnvironmentSection, ModelSection, PromptsSection, RunSection, TrainerSection
from headway.types import Checkpoint

WEIGHTS = Checkpoint(3, "x-3", "/runs/a/weights/00000003")


def config_of(path: str = "/models/base", **engine: Any) -> Config:
    return Config(
        run=RunSection(),
        model=ModelSection(path=path),
        prompts=PromptsSection(source="world:prompts"),
        environment=EnvironmentSection(entry="world:attempt"),
        trainer=TrainerSection(kind="external"),
        engine=EngineSection(**engine),
    )


def options_of(command: list[str]) -> dict[str, str]:
    """Return the options of a server's command by name; "" for one without a value."""
    after = command[command.index("--") + 1 :]
    found = {}
    for name, value in zip(after, [*after[1:], ""], strict=True):
        if name.startswith("--"):
            found[name.removeprefix("--")] = "" if value.startswith("--") else value
    return found


def test_a_vllm_is_started_with_what_headway_needs_and_the_users_arguments_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_ENGINE_KEY", "k" * 32)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    config = config_of(
        launch="vllm", arguments=("--dtype", "bfloat16"), dtype="float16", max_sequences=64, environment=("VLLM_NO_USAGE_STATS=0",)
    )
    launch = launch_of(config, 0, port=8001, weights=WEIGHTS)
    assert launch.command[-2:] == ["--dtype", "bfloat16"]
    server = launch.command[launch.command.index("--") + 1 :]
    assert server[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    options = options_of(launch.command[:-2])
    assert options == {
        "model": WEIGHTS.directory,
        "served-model-name": "policy",
        "host": "127.0.0.1",
        "port": "8001",
        "dtype": "float16",
        "max-num-seqs": "64",
        "logprobs-mode": "processed_logprobs",
        "middleware": "headway_access.AskForKey",
        "enable-scale-out": "",
    }
    assert launch.environment["VLLM_API_KEY"] == "k" * 32
    assert launch.environment["VLLM_NO_USAGE_STATS"] == "0"  # the user's wins
    ours, mine = launch.environment["PYTHONPATH"].split(":")
    assert (Path(ours, "headway_access.py").exists(), mine) == (True, "/mine")
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in launch.environment
    assert not any("k" * 32 in part for part in launch.command)


def test_with_lora_a_server_holds_the_base_model_and_takes_adapters() -> None:
    launch = launch_of(config_of(launch="vllm", weight_transfer="lora"), 0, port=1, weights=WEIGHTS)
    options = options_of(launch.command)
    assert (options["model"], options["enable-lora"], options["max-loras"]) == ("/models/base", "", "2")
    assert launch.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_an_sglang_is_started_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_ENGINE_KEY", "k" * 32)
    config = config_of(launch="sglang", max_context_tokens=4096, dtype="bfloat16", python="/base/venv/bin/python")
    launch = launch_of(config, 0, port=30000, weights=WEIGHTS)
    server = launch.command[launch.command.index("--") + 1 :]
    assert server[:2] == ["/base/venv/bin/python", "-c"]
    assert server[3] == "sglang.launch_server"
    options = options_of(launch.command)
    assert (options["model-path"], options["context-length"], options["max-running-requests"]) == (WEIGHTS.directory, "4096", "256")
    assert "enable-metrics" in options
    assert not any("k" * 32 in part for part in launch.command)
    assert launch.command[launch.command.index("--warm-up") + 1] == "/generate"
    assert (kind_of(config.engine), kind_of(EngineSection())) == ("sglang", "vllm")


def test_an_embedded_engine_has_no_guard_and_gets_devices_and_environment_too() -> None:
    config = config_of(launch="embedded", count=2, visible_devices=("0", "1"), environment=("A=b=c",), threads=2)
    launch = launch_of(config, 1, port=5, weights=WEIGHTS)
    assert launch.command[1:4] == ["-m", "headway", "engine"]
    assert launch.environment == {"A": "b=c", "CUDA_VISIBLE_DEVICES": "1"}
    assert launch.threads == 2


def test_python_is_a_path_or_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "python-of-mine"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    assert python_of(EngineSection(python="python-of-mine")) == str(program)
    assert python_of(EngineSection(python=str(program))) == str(program)
    assert python_of(EngineSection(python="/nowhere/python")) == "/nowhere/python"
    assert python_of(EngineSection()) == sys.executable


def test_a_python_that_breaks_is_told_with_what_it_said(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no library >&2\nexit 9\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match=r"finds no vllm \(no library\): install it, or name a Python that has it in engine.python"):
        check_servers(config_of(launch="vllm", python=str(program)))
    check_servers(config_of(launch="embedded", python=str(program)))  # which does not need it


# ------------------------------------------------------------------------------------------------- the key that a launched vLLM asks for


async def asked(key: str, path: str, *headers: tuple[bytes, bytes], kind: str = "http", monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Send one request through the middleware; return what came back, `["served"]` if it passed."""
    monkeypatch.setenv("VLLM_API_KEY", key)
    answers: list[Any] = []

    async def app(*_: Any) -> None:
        answers.append("served")

    async def receive() -> Any:
        raise AssertionError("nothing is read of a request that is refused")

    async def send(message: Any) -> None:
        answers.append(message)

    await AskForKey(app)({"type": kind, "path": path, "headers": list(headers)}, receive, send)
    return answers


@pytest.mark.parametrize("path", ["/collective_rpc", "/pause", "/v1/models", "/healthy", "/metrics/x"])
async def test_every_path_of_a_launched_vllm_asks_for_the_key(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = await asked("secret", path, (b"authorization", b"Bearer wrong"), monkeypatch=monkeypatch)
    assert [answer["type"] for answer in refused] == ["http.response.start", "http.response.body"]
    assert refused[0]["status"] == 401
    assert await asked("secret", path, (b"Authorization", b"Bearer secret"), monkeypatch=monkeypatch) == ["served"]
    assert (await asked("secret", path, monkeypatch=monkeypatch))[0]["status"] == 401
    closed = await asked("secret", path, kind="websocket", monkeypatch=monkeypatch)
    assert closed == [{"type": "websocket.close", "code": 1008}]


async def test_health_and_metrics_are_open_and_so_is_all_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, path, kind in (
        ("secret", "/health", "http"),
        ("secret", "/metrics", "http"),
        ("", "/pause", "http"),
        ("secret", "", "lifespan"),
    ):
        assert await asked(key, path, kind=kind, monkeypatch=monkeypatch) == ["served"]
