"""headway trains against a real vLLM: it learns, starts one itself, and goes on when one is killed and comes back with nobody's weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pushing import MEAN_DIFFERENCE, MOST_DIFFERENCE
from real_server import ENVIRONMENT, RealServer
from real_training import Training

from headway.testing import assert_run

GUESS = Path(__file__).parents[2] / "examples" / "guess" / "run.toml"
FEW = ("rollout.groups_per_batch=8", "rollout.max_concurrent=128", "trainer.minibatches=2")
LAUNCHED = ("--enforce-eager", "--no-enable-chunked-prefill")
BATCHES = 80
AT_FIRST = 0.12  # mean reward at most: four guesses among 57 characters find one digit in 15 games
LEARNT = 0.3  # at least, over the last ten batches: .35 to .45 were seen


def attached(server: RealServer) -> str:
    """The setting by which a run uses the server."""
    return f'engine.urls=["{server.url}"]'


@pytest.fixture
def runs() -> Iterator[list[Training]]:
    """Runs to be ended with the test."""
    runs: list[Training] = []
    yield runs
    for run in runs:
        run.close()


def test_guess_learns_on_it(server: RealServer, tmp_path: Path, runs: list[Training]) -> None:
    """examples/guess, with a quarter of its batch: after 80 batches of 64 games the policy finds several times what it found."""
    run = Training(GUESS, tmp_path / "guess", attached(server), *FEW, f"run.steps={BATCHES}")
    runs.append(run)
    assert run.end() == 0, run.tail()
    assert_run(run.directory, exit_code=0)
    rows = run.rows()
    assert len(rows) == BATCHES
    rewards = [row["reward_mean"] for row in rows]
    start, end = np.mean(rewards[:5]), np.mean(rewards[-10:])
    assert start < AT_FIRST
    assert end > LEARNT, rewards
    assert max(abs(row["mismatch_kl"]) for row in rows if row["mismatch_kl"] is not None) < 0.01
    assert not server.paused()


def test_killed_and_started_again_it_gets_the_weights_before_it_is_asked(server: RealServer, tmp_path: Path, runs: list[Training]) -> None:
    """The server comes back with the checkpoint of its command line under the label `default`: not a token of that is trained on."""
    settings = ("run.steps=12", "trainer.keep_checkpoints=20", "engine.lost_timeout_seconds=400", "rollout.timeout_seconds=600")
    run = Training(GUESS, tmp_path / "killed", attached(server), *FEW, *settings)
    runs.append(run)
    run.until_batch(4)
    server.kill()
    server.start()
    server.until_ready()
    assert run.end() == 0, run.tail()
    assert_run(run.directory, exit_code=0)
    assert [row["batch"] for row in run.rows()] == list(range(12))
    found = run.logprob_differences()
    assert len(found) > 1000
    assert found.mean() < MEAN_DIFFERENCE
    assert found.max() < MOST_DIFFERENCE
    assert server.label() == run.checkpoint(12).label or server.label() == run.checkpoint(11).label


def test_headway_starts_one_itself_and_ends_it(python: Path, tmp_path: Path, runs: list[Training]) -> None:
    arguments = ", ".join(f'"{argument}"' for argument in LAUNCHED)
    environment = ", ".join(f'"{name}={value}"' for name, value in ENVIRONMENT.items())
    launched = (f"engine.arguments=[{arguments}]", f"engine.environment=[{environment}]", "engine.dtype=bfloat16", "run.steps=4")
    run = Training(
        GUESS, tmp_path / "launched", "engine.launch=vllm", f"engine.python={python}", *launched, *FEW, "trainer.keep_checkpoints=9"
    )
    runs.append(run)
    assert run.end() == 0, run.tail()
    assert_run(run.directory, exit_code=0)
    found = run.logprob_differences()
    assert len(found) > 300
    assert found.mean() < MEAN_DIFFERENCE
    assert found.max() < MOST_DIFFERENCE
