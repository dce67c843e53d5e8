"""A whole run whose policy is a LoRA adapter: headway starts the vLLM, which is killed, and another program publishes adapters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from pushing import MEAN_DIFFERENCE, MOST_DIFFERENCE
from real_server import ENVIRONMENT
from real_training import Training
from tiny_models import write_merged

from headway.testing import assert_run
from headway.types import Checkpoint

STEPS = 10
CONFIG = """
[run]
steps = {steps}
[model]
path = "{model}"
[rollout]
groups_per_batch = 4
group_size = 4
max_concurrent = 48
max_staleness = 2
max_tokens = 6
timeout_seconds = 600
[prompts]
source = "turns:prompts"
[environment]
entry = "turns:attempt"
[trainer]
kind = "external"
[engine]
launch = "vllm"
python = "{python}"
weight_transfer = "lora"
dtype = "bfloat16"
arguments = ["--enforce-eager", "--no-enable-chunked-prefill", "--max-lora-rank", "8", "--max-loras", "3", "--max-cpu-loras", "4"]
environment = [{environment}]
lost_timeout_seconds = 400
"""
TURNS = """
from headway import Outcome

def prompts():
    return [{"id": f"p{n}"} for n in range(10)]

async def attempt(prompt, policy):
    game = await policy.open("<bos>?")
    for turn in range(4):
        written = (await game.generate(max_tokens=6)).token_ids
        game.observe("<")
    return Outcome(sum(written) % 7 / 7)
"""


@contextmanager
def trained(run: Training, base: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Have adapters published for a run, until the block ends."""
    command = [sys.executable, str(Path(__file__).with_name("adapter_trainer.py")), str(run.directory), str(base)]
    process = subprocess.Popen(command, env=os.environ)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        run.close()


def servers(run: Training) -> list[psutil.Process]:
    """The servers that the run has started."""
    family = psutil.Process(run.process.pid).children(recursive=True)
    return [process for process in family if "vllm.entrypoints.openai.api_server" in process.cmdline()]


def test_adapters_are_trained_on_also_when_the_server_that_holds_them_is_killed(
    python: Path, versions: list[Checkpoint], tmp_path: Path
) -> None:
    """Each token is of the base and the one adapter that it is stamped with. A new server begins with the base, and no adapter."""
    (tmp_path / "turns.py").write_text(TURNS)
    environment = ", ".join(f'"{name}={value}"' for name, value in ENVIRONMENT.items())
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(steps=STEPS, model=versions[0].directory, python=python, environment=environment))
    run = Training(config, tmp_path / "adapters", "trainer.keep_checkpoints=20")
    with trained(run, Path(versions[0].directory)) as trainer:
        run.until_batch(3)
        for server in servers(run):
            server.kill()
        assert run.end() == 0, run.tail()
        assert trainer.wait(60) == 0
    assert_run(run.directory, exit_code=0)
    rows = run.rows()
    assert [row["batch"] for row in rows] == list(range(STEPS))
    assert max(row["token_staleness_max"] for row in rows) <= 2
    assert run.rows("pipeline.jsonl")[-1]["engine_restarts"] == 1
    written_by = run.written_by()
    assert min(written_by) == 0
    assert max(written_by) >= STEPS - 3  # the last batch is trained on tokens that are no staler than two versions
    (tmp_path / "merged").mkdir()
    merged = [write_merged(tmp_path / "merged", version, versions[0]) for version in range(STEPS + 1)]
    found = run.logprob_differences(merged)
    assert len(found) >= STEPS * 16 * 24
    assert found.mean() < MEAN_DIFFERENCE
    assert found.max() < MOST_DIFFERENCE
