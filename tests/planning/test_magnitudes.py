"""Numbers that are slips of the pen are refused in one line, before they fill a memory or a day; large ones that can be are taken."""

import pytest

from headway.errors import ConfigError
from headway.planning.scenario_file import load_scenario

WORLD = ["workload.tokens=100", "training.seconds=10"]


def loaded(*overrides):
    return load_scenario(None, [*WORLD, *overrides])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("workload.tokens", "1e300", "on average: at most 500,000,000 tokens, written at 50 a second"),
        ("workload.tokens", '{kind = "pareto", mean = 1e13, shape = 2}', "on average: at most"),
        ("workload.prompt_tokens", "1e200", "at most 1,000,000,000,000 tokens"),
        ("workload.tool_seconds", "1e10", "at most 10,000,000 seconds"),
        ("workload.turns", "1000000000", "at most 10,000 (each of them is played)"),
        ("fleet.sync_seconds", "1e100", "at most 10,000,000 seconds"),
        ("fleet.engines", "1000000000", "at most 100,000 (each of them is played)"),
        ("fleet.tokens_per_second", "1e-300", "workload.tokens is 100 on average: at most 1e-293 tokens"),
        ("fleet.tokens_per_second", "1e300", "(no engine is so fast)"),
        ("fleet.half_speed_at", "1e-9", "tokens, written at 5e-08 a second"),
        ("fleet.prefill_tokens_per_second", "1e-9", "tokens, read at 1e-09 a second"),
        ("training.seconds", "1e300", "at most 10,000,000 seconds"),
        ("training.tokens_per_second", "1e300", "(no trainer is so fast)"),
        ("training.jitter", "50", "at most 10"),
        ("rollout.groups_per_batch", "1000000000", "at most 1,250,000 (with 8 rollouts in a group)"),
        ("rollout.max_staleness", "1000000000000", "at most 1,024"),
        ("budget.max_staleness", "1000000000000", "at most 1,024"),
        ("budget.groups_per_batch", "[64, 1000000000]", "budget.groups_per_batch[1] is 1000000000: at most 1,250,000"),
        ("rollout", "{batch_tokens = 100000000000, max_rollout_tokens = 1000}", "rollout.batch_tokens is 100000000000: at most"),
        ("run.steps", "1000000000000", "at most 10,000,000"),
        ("eval.prompts", "1000000000", "at most 10,000,000 (with 1 rollouts for each)"),
        ("faults", '[{at_seconds = 1e300, what = "engine_dies"}]', "faults[0].at_seconds"),
        ("faults", '[{at_seconds = 1, what = "engine_dies", for_seconds = 1e300}]', "faults[0].for_seconds"),
    ],
)
def test_what_no_run_ever_has_is_refused_in_one_line(key, value, said):
    with pytest.raises(ConfigError) as refused:
        loaded(f"{key}={value}")
    assert "\n" not in str(refused.value)
    assert said in str(refused.value)
    assert key.partition(".")[0] in str(refused.value) or "workload" in str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["workload.tokens=1e5", "workload.prompt_tokens=1e6"],
        ["training.seconds=1e6"],
        ["fleet.engines=10000", "rollout.groups_per_batch=65536", "rollout.max_concurrent=1000000"],
        ["workload.tokens=1e-6"],
        ["run.steps=1000000"],
    ],
)
def test_what_is_large_and_can_be_is_taken(overrides):
    assert loaded(*overrides)
