"""`headway engine check`: a line per check, JSON, exit codes, input that cannot be used."""

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from headway.cli import command_line
from headway.testing import EngineScript, Reply, Rule, engine_thread, write_tiny_model
from headway.testing.conformance import CHECKS

SCRIPT = EngineScript(context=256, token_seconds=0.003)


def test_an_engine_that_fails_nothing_is_0_with_a_line_per_check(capsys):
    with engine_thread(script=SCRIPT) as engine:
        code = command_line(["engine", "check", engine.url])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[0] == f"{engine.url}, vllm"
    assert [line.split()[1] for line in lines[1:-1]] == list(CHECKS)
    assert " 0 failed" in lines[-1]


def test_an_engine_that_fails_a_check_is_1_and_json_says_which(capsys):
    with engine_thread([Rule(match={"path": "/health"}, do=Reply(status=503))], script=SCRIPT) as engine:
        code = command_line(["engine", "check", engine.url, "--kind", "sglang", "--json"])
    verdicts = json.loads(capsys.readouterr().out)
    assert code == 1
    assert [verdict["name"] for verdict in verdicts if verdict["outcome"] == "failed"] == ["health"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ftp://x"], "must be a base URL"),
        (["http://127.0.0.1:1", "--model", "{model}"], "--model and --other are given together"),
        (["http://127.0.0.1:1", "--model", "{model}", "--other", "{model}/none"], "--other: "),
        (["http://127.0.0.1:1", "--model", "{model}", "--other", "{larger}"], "in the same types and shapes"),
    ],
)
def test_input_that_cannot_be_used_is_2(arguments, says, tmp_path, capsys):
    places = {"model": write_tiny_model(tmp_path / "a"), "larger": write_tiny_model(tmp_path / "b", size=17)}
    assert command_line(["engine", "check", *(argument.format(**places) for argument in arguments)]) == 2
    assert says in capsys.readouterr().err


def test_ctrl_c_gives_the_server_back_and_a_second_one_leaves_at_once_in_one_line(tmp_path):
    """The second one comes while a resume that never comes back is waited for."""
    hangs = Rule(match={"path": "/resume"}, do=Reply(hang=True))
    with engine_thread([hangs], script=SCRIPT) as engine:
        command = [sys.executable, "-m", "headway", "engine", "check", engine.url]
        checking = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        engine.call(engine.engine.until(lambda: engine.engine.paused, limit=60.0))
        checking.send_signal(signal.SIGINT)
        first = checking.stderr.readline()
        checking.send_signal(signal.SIGINT)
        _, rest = checking.communicate(timeout=60.0)
    assert first.startswith("headway: interrupted: the server is left as it was found")
    assert re.fullmatch(r"headway: the server may be paused now: POST /resume resumes it\n", rest), rest
    assert checking.returncode == 130


def write_adapter(directory, **config):
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1} | config))
    stem = "base_model.model.model.embed_tokens"
    pair = {f"{stem}.lora_A.weight": np.zeros((1, 8), np.float32), f"{stem}.lora_B.weight": np.zeros((16, 1), np.float32)}
    save_file(pair, directory / "adapter_model.safetensors")
    return directory


def test_an_adapter_that_is_given_is_checked_and_gone_afterwards(tmp_path, capsys):
    adapter = write_adapter(tmp_path / "adapter")
    with engine_thread(script=SCRIPT) as engine:
        code = command_line(["engine", "check", engine.url, "--adapter", str(adapter), "--json"])
        assert [entry["directory"] for entry in engine.entries() if entry["what"] == "adapter"] == [str(adapter)]
        assert engine.engine.adapters.loaded == {}
    verdicts = {verdict["name"]: verdict["outcome"] for verdict in json.loads(capsys.readouterr().out)}
    assert (code, verdicts["adapters"]) == (0, "passed")


def test_what_is_no_adapter_is_2_in_one_line_before_the_server_is_asked(tmp_path, capsys):
    places = {
        "nothing": tmp_path / "nothing",
        "model": write_tiny_model(tmp_path / "model"),
        "rank": write_adapter(tmp_path / "rank", r=2),
        "other": write_adapter(tmp_path / "other", peft_type="IA3"),
    }
    says = {"nothing": "adapter_config.json", "model": "adapter_config.json", "rank": "of rank 2", "other": "'IA3'"}
    with engine_thread(script=SCRIPT) as engine:
        for name, directory in places.items():
            assert command_line(["engine", "check", engine.url, "--adapter", str(directory)]) == 2
            out, err = capsys.readouterr()
            assert (out, err.count("\n")) == ("", 1), err
            assert err.startswith(f"headway: --adapter: {directory}"), err
            assert says[name] in err
        assert [entry["what"] for entry in engine.entries()] == ["served"]


def test_an_adapter_of_another_model_is_2(tmp_path, capsys):
    model, other = (write_tiny_model(tmp_path / name) for name in ("a", "b"))
    both = ["--model", str(model), "--other", str(other)]
    assert command_line(["engine", "check", "http://127.0.0.1:1", *both, "--adapter", str(write_adapter(tmp_path / "adapter"))]) == 2
    err = capsys.readouterr().err
    assert err.startswith("headway: --adapter: "), err
    assert "it is no adapter of this model" in err


def test_without_a_model_there_is_nothing_to_serve(capsys):
    assert command_line(["engine"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "headway: headway engine needs --model, the directory of a Hugging Face checkpoint: headway engine --model DIR\n"


def test_the_model_of_a_check_stands_behind_it(capsys):
    assert command_line(["engine", "--model", "x", "check", "http://127.0.0.1:1"]) == 2
    assert "headway engine check URL --model DIR" in " ".join(capsys.readouterr().err.split())
