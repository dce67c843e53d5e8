"""A stored batch trained again from the same trainer state makes the same weights, byte for byte."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from trainer_runs import LINEAGE, arrays_of, config
from trainer_runs import write_batch as write_batch_to

from headway.formats.run_directory import RunDirectory, RunInfo, numbered, save_run_info

torch = pytest.importorskip("torch")

from headway.embedded.trainer.loop import Trainer  # noqa: E402

pytestmark = pytest.mark.torch

FILES = ("weights", "model.safetensors"), ("trainer", "state.safetensors")
PROGRAM = "import sys, pathlib; from headway.embedded.trainer import serve; serve(pathlib.Path(sys.argv[1]))"
CONFIG = """
run = {steps = 4, seed = 7}
prompts = {source = "prompts.jsonl"}
environment = {entry = "guess:attempt"}
model.init = {hidden_size = 16, num_attention_heads = 2, num_key_value_heads = 1, head_dim = 8, intermediate_size = 32}
trainer = {device = "cpu", threads = 1, learning_rate = 1e-2, minibatches = 2}
"""


def trained(run, **keys):
    """Train to the last of the steps."""
    trainer = Trainer(run, config(**keys), lineage=LINEAGE)
    trainer.run(threading.Event())
    assert trainer.version == keys["steps"]


def made(run, version):
    """The bytes of a version: its weights, and what it takes to go on from it."""
    return [(run.path / directory / f"{version:08d}" / name).read_bytes() for directory, name in FILES]


def with_batches(path, n):
    run = RunDirectory.create(path)
    for k in range(n):
        write_batch_to(run, k)
    return run


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize(
    "keys",
    [{}, {"minibatches": 1, "loss": "tis"}, {"dtype": "bfloat16"}, {"schedule": "cosine", "max_tokens_per_microbatch": 16}],
    ids=["as it comes", "tis", "bfloat16", "small packs"],
)
def test_a_stored_batch_trained_again_from_the_stored_state_gives_the_same_bytes(tmp_path, keys, k):
    kept = with_batches(tmp_path / "kept", k + 1)
    trained(kept, steps=k + 1, keep_checkpoints=10, **keys)
    for again in ("again", "and again"):
        run = RunDirectory.create(tmp_path / again)
        for parent in ("weights", "trainer", "batches"):
            if (stored := kept.path / parent / f"{k:08d}").exists():
                shutil.copytree(stored, run.path / parent / stored.name)
        torch.rand(5)  # another process would have another random state
        trained(run, steps=k + 1, **keys)
        assert made(run, k + 1) == made(kept, k + 1)


def test_another_batch_gives_other_bytes(tmp_path):
    one, other = (RunDirectory.create(tmp_path / name) for name in ("one", "other"))
    write_batch_to(one, 0)
    write_batch_to(other, 0, arrays_of(0, seed=1))
    trained(one, steps=1)
    trained(other, steps=1)
    assert made(one, 1)[0] != made(other, 1)[0]


class _StopWhenAsked(threading.Event):
    """An event that is set from the n-th time that somebody looks."""

    def __init__(self, times):
        super().__init__()
        self.left = times

    def is_set(self):
        self.left -= 1
        return self.left < 0


def test_a_step_abandoned_at_any_pack_is_trained_again_to_the_same_bytes(tmp_path):
    keys: dict[str, Any] = {"steps": 2, "max_tokens_per_microbatch": 16, "minibatches": 2}
    straight = with_batches(tmp_path / "straight", 2)
    trained(straight, **keys)
    asked = 0
    while True:
        broken = with_batches(tmp_path / f"broken {asked}", 2)
        trainer = Trainer(broken, config(**keys), lineage=LINEAGE)
        trainer.run(_StopWhenAsked(asked))
        if trainer.version == 2:
            break
        trained(broken, **keys)
        assert made(broken, 2) == made(straight, 2), f"stopped at look {asked}"
        asked += 1
    assert asked > 8, "the step has many packs"


@pytest.mark.e2e
def test_a_trainer_killed_at_random_instants_makes_the_bytes_of_one_that_was_not(tmp_path):
    straight, killed = with_batches(tmp_path / "straight", 4), with_batches(tmp_path / "killed", 4)
    trained(straight, steps=4)
    killed.config.write_text(CONFIG)
    info: dict[str, Any] = {
        "id": "r",
        "lineage": LINEAGE,
        "headway_version": "0",
        "engine_version": "",
        "trainer_version": "",
        "seed": 7,
        "created": 0.0,
    }
    save_run_info(killed, RunInfo(**info))
    draw = random.Random(4)
    for version in (1, 3):
        with subprocess.Popen([sys.executable, "-c", PROGRAM, str(killed.path)]) as process:
            deadline = time.monotonic() + 180
            # It may be far beyond the version when it is looked at, and that one gone.
            while max(numbered(killed.weights), default=0) < version and time.monotonic() < deadline:
                time.sleep(draw.uniform(0, 0.002))
            process.kill()
    assert numbered(killed.weights)[-1] in {3, 4}
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(killed.path)]) as process:
        assert process.wait(180) == 0
    assert made(killed, 4) == made(straight, 4)
    assert not list(killed.path.rglob(".tmp-*"))
