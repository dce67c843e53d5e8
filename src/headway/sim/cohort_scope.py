"""What the cohort stepper can do, and how it says that it cannot."""

from __future__ import annotations

from typing import Literal, TypeAlias

from headway.errors import ConfigError
from headway.sim.distributions import Fixed
from headway.sim.scenario import Drawn, Scenario, drawn, tokens_of

Policy: TypeAlias = Literal["headway", "completion_order", "gate_and_sweep"]
"""Whose rules: headway's, or one of two references for comparison. All admit as headway does.

`completion_order`: batches in the order in which units ended, and all is trained on (AReaL). `gate_and_sweep`: what is older than
max_staleness is cancelled, or thrown away, before a batch is formed from the oldest (prime-rl).
"""


_NEGLIGIBLE = 1e-4  # a share of rollouts that would time out, and here do not


class NotForCohorts(ConfigError):
    """The scenario has something that the stepper has no vector step for."""


def refusal(scenario: Scenario, policy: Policy = "headway") -> str:
    """Say why the stepper cannot do a scenario; "": it can."""
    rollout, workload, fleet = scenario.rollout, scenario.workload, scenario.fleet
    limit = rollout.timeout_seconds
    timed_out = tokens_of(scenario).above(limit * fleet.tokens_per_second) if limit else 0.0
    reasons = {
        "engines that slow down with load (fleet.half_speed_at)": fleet.half_speed_at > 0,
        "prefill that takes time (fleet.prefill_tokens_per_second)": fleet.prefill_tokens_per_second > 0,
        "engines with a queue (fleet.max_sequences)": fleet.max_sequences > 0,
        "engines with a KV limit (fleet.kv_tokens)": fleet.kv_tokens > 0,
        f'fleet.weight_sync = "{fleet.weight_sync}"': fleet.weight_sync != "in_flight",
        'fleet.sync_order = "rolling" over several engines': fleet.sync_order == "rolling"
        and fleet.engines > 1
        and _takes_time(fleet.sync_seconds),
        "syncs that take each engine another time": fleet.engines > 1 and not isinstance(drawn(fleet.sync_seconds), Fixed),
        "tools between turns (workload.tool_seconds)": workload.turns > 1 and _takes_time(workload.tool_seconds),
        "a scorer that takes time (workload.score_seconds)": _takes_time(workload.score_seconds),
        "failures (workload.failures)": bool(workload.failures),
        "groups that score alike (workload.zero_advantage_share)": workload.zero_advantage_share > 0,
        "groups that a filter refuses (workload.filtered_share)": workload.filtered_share > 0,
        "faults": bool(scenario.faults),
        "evaluations ([eval])": scenario.eval is not None,
        'rollout.enforce = "ship"': rollout.enforce == "ship",
        "batches sized by tokens (rollout.batch_tokens)": rollout.batch_tokens > 0,
        'rollout.steps_ahead = "auto"': rollout.steps_ahead == "auto",
        "a trainer whose time depends on the batch's tokens": scenario.training.tokens_per_second > 0,
        f"rollouts that time out ({timed_out:.2%} of them; rollout.timeout_seconds = 0: none)": timed_out > _NEGLIGIBLE,
        f'on_stale = "{rollout.on_stale}" with a reference policy': policy != "headway" and rollout.on_stale not in {"train", "mask"},
    }
    return next((reason for reason, found in reasons.items() if found), "")


def _takes_time(seconds: Drawn) -> bool:
    return drawn(seconds).mean > 0
