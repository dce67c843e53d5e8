"""Plays a scenario: its sections become a simulated world, the sections of a config and faults at given times, and the real components run.

The run is given more steps than are played (`_NO_END`), is observed (`sim.observer`), and stops in the instant in which the scenario's last
batch is trained: nothing is drained, and no batch is the last as far as admission knows. Nothing else ends it early, but for a world in
which nothing can be trained: EmptyBatches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.events import EvalFinished
from headway.rules.advantages import grpo
from headway.settings import EngineSection, EvalSection, MetricsSection, RunSection
from headway.sim.chance import Draws
from headway.sim.distributions import NO_TIME
from headway.sim.engine import EngineSettings
from headway.sim.load import LoadSettings
from headway.sim.observer import Window
from headway.sim.played import Played
from headway.sim.rollouts import Fault as Failing
from headway.sim.rollouts import Reward, RolloutSettings
from headway.sim.run import SimResult, simulate
from headway.sim.scenario import Fault, Scenario, drawn, tokens_of, warm_up_of
from headway.sim.settings import WorldSettings
from headway.sim.summary import BYTES_PER_TOKEN
from headway.sim.timeline import engine_intervals, gate_intervals, most_waiting_tokens, trainer_intervals
from headway.sim.trainer import TrainerFault, TrainerSettings
from headway.sim.world import Kill
from headway.types import Prompt

_NO_END = 1_000_000  # steps beyond those that are played
_NEVER_SECONDS = 1e9


def play(scenario: Scenario, *, limit_seconds: float = 1e9, progress: Callable[[int], None] | None = None) -> Played:
    """Play a scenario to its end; the same scenario gives the same history. Raises HeadwayError where the run ends with one.

    `limit_seconds`: virtual time at which `sim.loop.NoEnd` is raised. `progress` is told how many batches are trained, as it goes.
    """
    length = scenario.run
    warm_up = warm_up_of(scenario)
    result = simulate(
        world_of(scenario),
        scenario.rollout,
        _run_section(scenario),
        evaluation=_eval_section(scenario),
        metrics=MetricsSection(interval_seconds=_NEVER_SECONDS),
        engine=_engine_section(scenario),
        kills=_kills(scenario),
        limit_seconds=limit_seconds,
        window=Window(warm_up, length.steps, progress),
    )
    observed = result.observed
    assert observed is not None  # noqa: S101  a window was asked for
    assert observed.start is not None  # noqa: S101  it ended
    assert observed.end is not None  # noqa: S101  it ended
    gate = gate_intervals(observed, observed.end)
    before, after = observed.at_start, observed.at_end
    seconds = max(observed.end - observed.start, 1e-9)
    return Played(
        scenario=scenario,
        result=result,
        warm_up=warm_up,
        start=observed.start,
        end=observed.end,
        trainer=trainer_intervals(observed, result.world.trainer_log, observed.end),
        engines={engine.name: engine_intervals(engine, gate, observed.end) for engine in result.world.engines},
        gate=gate,
        in_flight_mean=observed.in_flight_mean,
        in_flight_max=observed.in_flight_max,
        ready_groups_max=observed.ready_groups_max,
        waiting_bytes_max=BYTES_PER_TOKEN * most_waiting_tokens(result.events, observed.start),
        sequences={name: (so_far - before.sequences.get(name, 0.0)) / seconds for name, so_far in after.sequences.items()},
        preemptions=after.preemptions - before.preemptions,
        sampled=after.sampled - before.sampled,
        undelivered=[entry for worker in result.workers for entry in worker.undelivered],
        in_progress=sum(worker.in_progress for worker in result.workers),
        eval_in_progress=_eval_in_progress(result),
    )


def world_of(scenario: Scenario) -> WorldSettings:
    """Return the world that a scenario describes."""
    training, seed = scenario.training, scenario.run.seed
    return WorldSettings(
        seed=seed,
        rollouts=_rollouts(scenario),
        engines=[_engine(scenario, number) for number in range(scenario.fleet.engines)],
        trainer=TrainerSettings(
            seconds=drawn(training.seconds),
            tokens_per_second=training.tokens_per_second,
            jitter=training.jitter,
            faults=tuple(
                TrainerFault(fault.at_seconds, fault.for_seconds, fault.what == "trainer_dies")
                for fault in _faults(scenario)
                if fault.what in {"trainer_stalls", "trainer_dies"}
            ),
        ),
        prompts=0,
        advantages=grpo if scenario.rollout.group_size > 1 else _rewards,  # there is nobody to compare a single rollout with
        keep=_keep if scenario.workload.filtered_share else None,
        eval_prompts=scenario.eval.prompts if scenario.eval else 0,
        score_concurrency=_NO_END,
    )


def _faults(scenario: Scenario) -> list[Fault]:
    return sorted(scenario.faults, key=lambda fault: fault.at_seconds)


def _engine(scenario: Scenario, number: int) -> EngineSettings:
    fleet = scenario.fleet
    deaths: list[tuple[float, float]] = []
    for fault in _faults(scenario):
        if fault.what == "engine_dies" and fault.engine == number:
            dies, back = fault.at_seconds, fault.at_seconds + fault.for_seconds
            if deaths and dies <= deaths[-1][1]:  # it is away already
                dies, back = deaths[-1][0], max(back, deaths.pop()[1])
            deaths.append((dies, back))
    return EngineSettings(transfer_seconds=drawn(fleet.sync_seconds), deaths=tuple(deaths), load=_load(scenario), seed=scenario.run.seed)


def _load(scenario: Scenario) -> LoadSettings | None:
    """Return how an engine behaves under load; None: as without."""
    fleet = scenario.fleet
    if not (fleet.half_speed_at or fleet.prefill_tokens_per_second or fleet.max_sequences or fleet.kv_tokens):
        return None
    return LoadSettings(
        tokens_per_second=fleet.tokens_per_second,
        half_speed_at=fleet.half_speed_at,
        prefill_tokens_per_second=fleet.prefill_tokens_per_second,
        max_sequences=fleet.max_sequences,
        kv_tokens=fleet.kv_tokens,
        recompute_kv=fleet.recompute_kv or fleet.weight_sync == "abort_resume",  # what is aborted comes again with what it had
    )


def _kills(scenario: Scenario) -> list[Kill]:
    return [Kill(at=fault.at_seconds, down_seconds=fault.for_seconds) for fault in _faults(scenario) if fault.what == "orchestrator_dies"]


def _rewards(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    return rewards


def _rollouts(scenario: Scenario) -> RolloutSettings:
    workload, fleet = scenario.workload, scenario.fleet
    scores = drawn(workload.score_seconds)
    return RolloutSettings(
        seconds=tokens_of(scenario).scaled(1 / fleet.tokens_per_second),
        tokens_per_second=fleet.tokens_per_second,
        prompt_tokens=drawn(workload.prompt_tokens),
        turns=workload.turns,
        tool_seconds=drawn(workload.tool_seconds),
        observed_tokens=workload.observed_tokens,
        faults=tuple(Failing(failing.cause, failing.share, failing.retried) for failing in workload.failures),
        reward=_reward(scenario.run.seed, alike=workload.zero_advantage_share, refused=workload.filtered_share),
        scored_apart=scores != NO_TIME,
        score_seconds=scores,
        scored_together=True,
    )


def _reward(seed: int, *, alike: float, refused: float) -> Reward:
    """Return a reward that is the same for all members of a share of the prompts, and nobody else's for those of the others.

    Prompts whose groups a filter refuses have rewards below 0 (`_keep`).
    """

    def reward(prompt: Prompt, _: int, drawn: float) -> float:
        if refused and Draws(seed, "refused", prompt.id, prompt.epoch).random() < refused:
            return -drawn
        same = alike > 0 and Draws(seed, "alike", prompt.id, prompt.epoch).random() < alike
        return 1.0 if same else drawn

    return reward


def _keep(rewards: Sequence[float]) -> bool:
    return rewards[0] >= 0


def _run_section(scenario: Scenario) -> RunSection:
    return RunSection(
        seed=scenario.run.seed,
        steps=scenario.run.steps + _NO_END,
        stall_seconds=0.0,
        max_empty_batches=50,
        max_consecutive_failures=0,
        max_uncovered_batches=0,
        min_free_bytes=0,
    )


def _engine_section(scenario: Scenario) -> EngineSection:
    fleet = scenario.fleet
    return EngineSection(
        weight_sync=fleet.weight_sync,
        recompute_kv=fleet.recompute_kv,
        sync_order=fleet.sync_order,
        on_lost=fleet.on_lost,
        start_timeout_seconds=_NEVER_SECONDS,
        lost_timeout_seconds=_NEVER_SECONDS,
    )


def _eval_section(scenario: Scenario) -> EvalSection | None:
    given = scenario.eval
    if given is None:
        return None
    return EvalSection(every=given.every, prompts="scenario", n=given.n, hold_seconds=given.hold_seconds, at_start=given.at_start)


def _eval_in_progress(result: SimResult) -> int:
    delivered = sum(worker.eval_delivered for worker in result.workers)
    return 0 if not delivered else delivered - sum(event.sampled_tokens for event in result.events if isinstance(event, EvalFinished))
