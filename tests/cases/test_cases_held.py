"""O03: a trainer that stands still, and long rollouts: what is held is bounded, nothing more is started, and it goes on by itself."""

import signal
import time

import psutil
import pytest
from shipped import dropped_groups, lost_of, rows_of

from headway.testing import Act, EngineScript, EnvironmentRule, EnvironmentScript, Fault, Reply, Stage, Turn

pytestmark = pytest.mark.e2e

TOKENS = 15_000
LONG = EngineScript(context=2 * TOKENS, default=Reply(tokens=TOKENS), cache_block=TOKENS)
ENVIRONMENT = EnvironmentScript(
    prompts=40,
    rules=(EnvironmentRule(match={"prompt": "p0003", "member": 1}, times=1, do=Act(after=Fault(hang=True))),),
    default=Act(turns=(Turn(max_tokens=TOKENS),)),
)
SETTINGS = {
    "run.steps": 5,
    "prompts.shuffle": False,
    "rollout.groups_per_batch": 2,
    "rollout.group_size": 2,
    "rollout.max_concurrent": 8,
    "rollout.max_staleness": 2,
    "rollout.steps_ahead": 2,
    "rollout.max_tokens": TOKENS,
    "rollout.timeout_seconds": 20,
    "rollout.max_held_bytes": 100_000,
    "run.stall_seconds": 0,
}
WITHIN = 3 * 2  # groups: those of the batches that may be of version 0


def test_O03_a_stalled_trainer_and_long_rollouts_fill_no_memory_and_pin_no_group(tmp_path):
    with Stage(tmp_path, engines=[LONG], environment=ENVIRONMENT, settings=SETTINGS) as stage:
        stage.trainer.signal(signal.SIGSTOP)
        run = stage.start()

        def stands_still():
            rows = stage.rows("pipeline.jsonl")[-3:]
            in_batches = rows[-1]["batches_formed"] * 2 if rows else 0
            return bool(rows) and all(row["groups_ready"] + in_batches == WITHIN and not row["rollouts_in_flight"] for row in rows)

        stage.until(stands_still, what="all groups that may start to be complete")
        process = psutil.Process(run.process.pid)
        began, held = time.monotonic(), process.memory_info().rss
        asked = len(stage.requests("arrived"))
        stage.until(lambda: time.monotonic() > began + 1.5)
        assert process.memory_info().rss - held < 4 * 2**20  # a few arenas, whatever one second after the other is written down
        assert len(stage.requests("arrived")) == asked
        row = stage.rows("pipeline.jsonl")[-1]
        assert (row["capacity"], row["version"], row["groups_running"]) == (0, 0, 0)
        on_disk = sum(path.stat().st_size for path in (stage.run / "state").rglob("*") if path.is_file())
        assert on_disk > 2 * WITHIN * TOKENS * 8
        stage.trainer.signal(signal.SIGCONT)
        ended = run.end()
        assert ended.code == 0, ended.err
        stage.check(ended)
        assert len(rows_of(stage)) == 5 * 2 * 2
        assert set(lost_of(stage, 3).values()) == {"timeout"}
        assert dropped_groups(stage)[3] == ("incomplete", True)
        assert {row["prompt_id"] for row in rows_of(stage)} >= {"p0003"}
        assert all(sum(row["samples"][0]["sampled_mask"]) == TOKENS for row in rows_of(stage))
