"""`headway engine check`: a line per check, JSON, exit codes, input that cannot be used."""

import json

import pytest

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


def test_the_model_of_a_check_stands_behind_it(capsys):
    assert command_line(["engine", "--model", "x", "check", "http://127.0.0.1:1"]) == 2
    assert "headway engine check URL --model DIR" in " ".join(capsys.readouterr().err.split())
