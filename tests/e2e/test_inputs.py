"""What a person gets wrong before anything runs: one line that says what, where and what to do, exit code 2, and nothing used up."""

import re
import shutil
import socket

import pytest
from real_runs import Bench

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

PROMPTS = {
    "a broken line": ('{"id": "a"}\n{"id": "b",\n', r"prompts\.jsonl:2: each line must be one JSON object"),
    "an id given twice": ('{"id": "a"}\n{"id": "a"}\n', r'rows 0 and 1 of .*prompts\.jsonl have the same id "a": ids must be unique'),
}


@pytest.mark.parametrize(("lines", "says"), PROMPTS.values(), ids=PROMPTS)
def test_prompts_that_cannot_be_read_use_up_no_run_directory(bench: Bench, lines: str, says: str):
    (bench.directory / "prompts.jsonl").write_text(lines)
    ended = bench.play("prompts.source=prompts.jsonl", "environment.workers=0")
    assert ended.code == 2
    assert re.search(says, ended.last_error)
    assert not ended.run.directory.exists()
    checked = bench.check("prompts.source=prompts.jsonl", f"model.path={bench.checkpoint}")
    assert (checked.returncode, checked.stdout) == (2, "")
    assert re.search(says, checked.stderr)


def test_a_directory_is_one_runs_alone_while_it_lives_and_afterwards(bench: Bench):
    bench.hold(0)
    first = bench.start("environment.entry=world:slow", "rollout.timeout_seconds=600")
    first.until_batch(0)
    while_it_lives = bench.play(attached=False)  # a second trainer in its directory would be in the way of its own
    assert while_it_lives.code == 2
    assert first.process.poll() is None
    bench.go_on()
    ended = first.end()
    assert ended.code == 0
    afterwards = bench.play()
    assert afterwards.code == 2
    assert afterwards.last_error.endswith(
        "run: holds another run: choose another run.name or run.directory, or take it up again with --resume"
    )
    assert ended.run.info()["ended"] == ended.recorded


def test_a_port_in_use_and_a_key_misspelt_are_told_before_anything_starts(bench: Bench):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = bench.play(f"engine.port={port}", attached=False)
    assert ended.code == 2
    assert ended.last_error.endswith(f"engine.port is {port}: Address already in use: choose another, or 0 for a free one")
    assert not ended.run.directory.exists()
    misspelt = bench.play("rollout.max_stalenes=1")
    assert (misspelt.code, misspelt.err) == (2, "headway: --set: rollout.max_stalenes: no such key; did you mean rollout.max_staleness?\n")


def test_a_checkpoint_that_was_cut_short_is_refused_before_anything_starts(bench: Bench):
    damaged = bench.directory / "damaged"
    shutil.copytree(bench.checkpoint, damaged)
    weights = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    ended = Bench(bench.directory, url=bench.url, checkpoint=damaged).play()
    assert ended.code == 2
    assert "model.safetensors is damaged or incomplete" in ended.last_error
