"""What the keys of a scenario say about each other: worlds that cannot be, runs that would never train, plans that cannot be kept.

Pure: a scenario in, problems out, one line each. What a config is refused for is asked of the config's own rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

import msgspec

from headway.config.contradictions import contradictions
from headway.config.problems import Problem, is_wrong
from headway.config.toml import toml_value
from headway.planning.magnitudes import too_large
from headway.rules.advantages import ADVANTAGES
from headway.settings import Config, EngineSection, EnvironmentSection, PromptsSection, RolloutSection, TrainerSection
from headway.sim.distributions import Given
from headway.sim.scenario import Scenario, drawn, tokens_of
from headway.types import Cause

OF_AN_ATTEMPT: tuple[Cause, ...] = (
    "environment_error",
    "engine_error",
    "worker_died",
    "prompt_too_long",
    "timeout",
    "bad_reward",
    "empty_completion",
    "length_mismatch",
)
"""What an attempt by itself can be lost to; the other causes follow from what becomes of its group."""
_MORE_THAN_ALL = 1 + 1e-9  # three times 1/3, as decimals round


def scenario_contradictions(scenario: Scenario) -> list[Problem]:
    """Return everything that is wrong with the values of a scenario taken together; empty: it can be simulated."""
    if problems := list(_one_length(scenario)):
        return problems  # the others ask for the tokens of a rollout
    if problems := [*_means(scenario), *too_large(scenario)]:
        return problems  # the others reckon with them
    return [
        *_workload(scenario),
        *_rollout(scenario),
        *_trainer(scenario),
        *_room(scenario),
        *_faults(scenario),
        *_budget(scenario),
        *_length(scenario),
    ]


def _one_length(scenario: Scenario) -> Iterator[Problem]:
    tokens, seconds = scenario.workload.tokens, scenario.workload.seconds
    if tokens is not None and seconds is not None:
        yield Problem("workload.tokens", "workload.tokens and workload.seconds are both given: keep one, they say the same in two units")
    elif tokens is None and seconds is None:
        yield Problem(
            "workload.tokens",
            "workload.tokens is missing: how long are the rollouts? Add under [workload]: "
            'tokens = {kind = "lognormal", mean = 800, sigma = 1} (or seconds)',
        )


def _distributions(scenario: Scenario) -> Iterator[tuple[str, Given]]:
    """Yield every distribution by its key."""
    for section in ("workload", "fleet", "training"):
        values = getattr(scenario, section)
        for name in values.__struct_fields__:
            value: object = getattr(values, name)
            if isinstance(value, get_args(Given)):
                yield f"{section}.{name}", value


def _means(scenario: Scenario) -> Iterator[Problem]:
    for key, distribution in _distributions(scenario):
        if not math.isfinite(distribution.mean):
            yield Problem(
                key, f"{key}: its mean is not a number that a computer holds: a distribution without a mean cannot be planned for"
            )


def _workload(scenario: Scenario) -> Iterator[Problem]:
    workload = scenario.workload
    key = "workload.tokens" if workload.tokens is not None else "workload.seconds"
    if not tokens_of(scenario).mean:
        yield Problem(key, f"{key} is 0: a rollout that writes nothing trains nothing: make it more than 0")
    limit, seconds = scenario.rollout.timeout_seconds, tokens_of(scenario).scaled(1 / scenario.fleet.tokens_per_second)
    if limit and seconds.above(limit) >= 1:
        reason = f"no rollout would end in time: one is written on for {seconds.mean:,.0f} s on average, as fast as engines are"
        yield is_wrong("rollout.timeout_seconds", limit, f"{reason}: raise it, or 0 (no limit)")
    for name in ("zero_advantage_share", "filtered_share"):
        if getattr(workload, name) == 1:
            yield is_wrong(f"workload.{name}", 1, "no group would ever train: it must be below 1")
    shares = [failing.share for failing in workload.failures]
    total = math.fsum(shares)
    if total > _MORE_THAN_ALL:
        yield Problem("workload.failures", f"workload.failures: the shares add up to {total:g}: at most 1, they are parts of all attempts")
    elif shares and total >= 1:
        yield Problem("workload.failures", "workload.failures: the shares add up to 1: no attempt would ever finish")
    for number, failing in enumerate(workload.failures):
        if failing.cause not in OF_AN_ATTEMPT:
            causes = ", ".join(map(toml_value, OF_AN_ATTEMPT))
            yield is_wrong(f"workload.failures[{number}].cause", failing.cause, f"an attempt is lost to one of {causes}")


def _rollout(scenario: Scenario) -> Iterator[Problem]:
    """Yield what the config's own rules say against [rollout] and the fleet's keys that are the config's."""
    fleet = scenario.fleet
    if scenario.rollout.filter:
        yield is_wrong("rollout.filter", scenario.rollout.filter, "a simulation runs no code of yours: set workload.filtered_share instead")
    rollout = msgspec.structs.replace(scenario.rollout, filter="", advantage=_advantage(scenario.rollout))
    config = Config(
        prompts=PromptsSection(source="scenario:prompts"),
        environment=EnvironmentSection(
            entry="scenario:attempt", score="scenario:score" if drawn(scenario.workload.score_seconds).mean else ""
        ),
        rollout=rollout,
        engine=EngineSection(weight_sync=fleet.weight_sync, recompute_kv=fleet.recompute_kv),
        trainer=TrainerSection(kind="external"),
    )
    for problem in contradictions(config):
        if problem.key.startswith("rollout."):
            yield problem
        elif problem.key == "engine.recompute_kv":
            yield Problem("fleet.recompute_kv", problem.message.replace("engine.recompute_kv", "fleet.recompute_kv"))


def _advantage(rollout: RolloutSection) -> str:
    """Return an advantage that rules look at: a known name is checked, and any will do, since none of them changes what is simulated."""
    mine = ":" in rollout.advantage or (rollout.group_size == 1 and rollout.advantage in ADVANTAGES)
    return "scenario:advantage" if mine else rollout.advantage


def _trainer(scenario: Scenario) -> Iterator[Problem]:
    training = scenario.training
    if not drawn(training.seconds).mean and not training.tokens_per_second:
        yield Problem(
            "training.seconds",
            "training.seconds is 0 and training.tokens_per_second is not set: a trainer that takes no time cannot be planned for: "
            "add under [training]: seconds = 30, or tokens_per_second = 20000, or both",
        )


def _room(scenario: Scenario) -> Iterator[Problem]:
    """A rollout whose tokens do not fit into an engine's KV cache alone could never end there."""
    fleet, workload = scenario.fleet, scenario.workload
    if not fleet.kv_tokens:
        return
    observed = workload.observed_tokens * (workload.turns - 1)
    prompt, written = drawn(workload.prompt_tokens), tokens_of(scenario)
    for typical, size in (("longest", prompt.largest + written.largest), ("average", prompt.mean + written.mean)):
        if math.isfinite(size) and size + observed > fleet.kv_tokens:
            tokens = math.ceil(size + observed)
            remedy = f"the {typical} rollout has {tokens} tokens with its prompt and must fit alone: raise it, or 0 (no limit)"
            yield is_wrong("fleet.kv_tokens", fleet.kv_tokens, remedy)
            return


def _faults(scenario: Scenario) -> Iterator[Problem]:
    for number, fault in enumerate(scenario.faults):
        if fault.what == "engine_dies" and fault.engine >= scenario.fleet.engines:
            yield is_wrong(
                f"faults[{number}].engine",
                fault.engine,
                f"there is no such engine: fleet.engines is {scenario.fleet.engines}, and they are counted from 0",
            )


def _budget(scenario: Scenario) -> Iterator[Problem]:
    budget, rollout = scenario.budget, scenario.rollout
    engines = budget.engines or scenario.fleet.engines
    if budget.sequences_per_engine and budget.sequences_per_engine * engines < rollout.group_size:
        yield is_wrong(
            "budget.sequences_per_engine",
            budget.sequences_per_engine,
            f"{engines} {'engine holds' if engines == 1 else 'engines hold'} {budget.sequences_per_engine * engines} rollouts then, "
            f"less than a group (rollout.group_size = {rollout.group_size}): no plan can keep to it",
        )
    if budget.head_coverage == 1 and not math.isfinite(tokens_of(scenario).largest):
        yield is_wrong("budget.head_coverage", 1, "rollouts have no longest length here, so no plan covers them all: it must be below 1")


def _length(scenario: Scenario) -> Iterator[Problem]:
    run = scenario.run
    if run.warm_up is not None and run.warm_up >= run.steps:
        yield is_wrong("run.warm_up", run.warm_up, f"it must be below run.steps ({run.steps}), or there is nothing to tell figures of")
