"""How large the numbers of a scenario may be: larger ones are slips of the pen, and would fill a memory, or a day.

Nothing takes longer than four months: somebody on virtual time asks every engine every few seconds how it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from headway.config.problems import Problem, is_wrong
from headway.planning.balance import groups_of, train_seconds
from headway.sim.scenario import Drawn, Scenario, drawn

_SECONDS, _TOKENS, _PER_SECOND = 1e7, 1e12, 1e12
MOST_ROLLOUTS = 10_000_000  # of a batch, or an evaluation: a simulation holds each of them
_ENGINES, _TURNS, MOST_STALENESS = 100_000, 10_000, 1024


def too_large(scenario: Scenario) -> Iterator[Problem]:
    """Yield what is wrong with numbers by themselves, and with a trainer's speed beside the size of its batches."""
    lengths = list(_lengths(scenario))
    yield from lengths
    if not lengths and train_seconds(scenario) > _SECONDS:
        speed = scenario.training.tokens_per_second
        words = f"a batch would take {train_seconds(scenario):.3g} seconds, at most {_plain(_SECONDS)} (four months)"
        yield Problem("training.tokens_per_second", f"training.tokens_per_second is {speed:g}: {words}")
    workload, fleet, rollout, run = scenario.workload, scenario.fleet, scenario.rollout, scenario.run
    size = rollout.group_size
    counts: list[tuple[str, float, float, str]] = [
        ("rollout.groups_per_batch", rollout.groups_per_batch, MOST_ROLLOUTS / size, f"with {size} rollouts in a group"),
        ("rollout.max_staleness", rollout.max_staleness, MOST_STALENESS, 'for no bound at all: on_stale = "train"'),
        ("budget.max_staleness", scenario.budget.max_staleness, MOST_STALENESS, "that is hardly a bound"),
        ("workload.turns", workload.turns, _TURNS, "each of them is played"),
        ("workload.observed_tokens", workload.observed_tokens, _TOKENS, "no context is so long"),
        ("fleet.engines", fleet.engines, _ENGINES, "each of them is played"),
        ("fleet.tokens_per_second", fleet.tokens_per_second, _PER_SECOND, "no engine is so fast"),
        ("fleet.prefill_tokens_per_second", fleet.prefill_tokens_per_second, _PER_SECOND, "no engine is so fast"),
        ("training.tokens_per_second", scenario.training.tokens_per_second, _PER_SECOND, "no trainer is so fast"),
        ("training.jitter", scenario.training.jitter, 10.0, "steps would take anything from nothing to for ever"),
        ("run.steps", run.steps, MOST_ROLLOUTS, "each of them is played"),
    ]
    counts += [
        (f"budget.groups_per_batch[{number}]", groups, MOST_ROLLOUTS / size, f"with {size} rollouts in a group")
        for number, groups in enumerate(scenario.budget.groups_per_batch)
    ]
    counts += [(f"faults[{number}].at_seconds", fault.at_seconds, _SECONDS, "four months") for number, fault in enumerate(scenario.faults)]
    counts += [
        (f"faults[{number}].for_seconds", fault.for_seconds, _SECONDS, "four months") for number, fault in enumerate(scenario.faults)
    ]
    if rollout.batch_tokens:
        most = MOST_ROLLOUTS * rollout.batch_tokens / (groups_of(scenario) * size)
        counts.append(("rollout.batch_tokens", rollout.batch_tokens, most, f"{MOST_ROLLOUTS:,} rollouts"))
    if scenario.eval is not None:
        counts.append(("eval.prompts", scenario.eval.prompts, MOST_ROLLOUTS / scenario.eval.n, f"with {scenario.eval.n} rollouts for each"))
    for key, value, most, why in counts:
        if value > most:
            yield is_wrong(key, value, f"at most {_plain(most)} ({why})")


def _lengths(scenario: Scenario) -> Iterator[Problem]:
    workload, fleet = scenario.workload, scenario.fleet
    speed = fleet.tokens_per_second / (1.0 + 1.0 / fleet.half_speed_at if fleet.half_speed_at else 1.0)
    lengths: list[tuple[str, Drawn, float, str]] = [
        ("workload.tool_seconds", workload.tool_seconds, _SECONDS, "seconds"),
        ("workload.score_seconds", workload.score_seconds, _SECONDS, "seconds"),
        ("fleet.sync_seconds", fleet.sync_seconds, _SECONDS, "seconds"),
        ("training.seconds", scenario.training.seconds, _SECONDS, "seconds"),
    ]
    most, unit = _TOKENS, "tokens"
    if fleet.prefill_tokens_per_second and _SECONDS * fleet.prefill_tokens_per_second < _TOKENS:
        most, unit = _SECONDS * fleet.prefill_tokens_per_second, f"tokens, read at {fleet.prefill_tokens_per_second:g} a second"
    lengths.append(("workload.prompt_tokens", workload.prompt_tokens, most, unit))
    most, unit = min(_TOKENS, _SECONDS * speed), f"tokens, written at {speed:g} a second"
    if workload.tokens is not None:
        lengths.append(("workload.tokens", workload.tokens, most, unit))
    else:
        lengths.append(("workload.seconds", workload.seconds or 0.0, most / fleet.tokens_per_second, "seconds"))
    for key, value, largest, words in lengths:
        mean = drawn(value).mean
        if mean > largest:
            yield Problem(key, f"{key} is {mean:g} on average: at most {_plain(largest)} {words}")


def _plain(number: float) -> str:
    return f"{math.floor(number):,}" if number >= 1 else f"{number:g}"
