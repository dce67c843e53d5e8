"""The sections of a scenario, each from what was observed of a run; what none of it tells goes to `notes`, by the key that it would be.

What a run does to rollouts by itself (drops what is stale, filters, cuts short) is no matter of its world: a simulated one does it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np

from headway.planning.config_knobs import left_out
from headway.planning.contradictions import OF_AN_ATTEMPT
from headway.planning.engine_speed import Speed
from headway.planning.evaluations import evaluations_of
from headway.planning.observed import Observed
from headway.planning.pieces import empirical, pieces
from headway.planning.run_config import RunConfig
from headway.planning.trainer_speed import Pace
from headway.settings import RolloutSection
from headway.sim.distributions import Floats
from headway.sim.scenario import Drawn, EvaluationSection, Failing, FleetSection, TrainingSection, WorkloadSection

_MOST_ALIKE = 0.99  # of all prompts: were it all of them, no group would ever train


def engines_of(observed: Observed, config: RunConfig) -> tuple[int, int]:
    """Return how many engines there are, and how many sequences each decodes at once (0: that is not known)."""
    engine = config.engine
    count = round(median(sync.engines for sync in observed.syncs)) if observed.syncs else len(engine.urls) or engine.count
    launched = engine.launch != "none" and not engine.urls and not engine.urls_file
    return max(1, count), engine.max_sequences if launched else 0


def workload_of(observed: Observed, speed: Speed, config: RunConfig, notes: list[str]) -> WorkloadSection:
    """Return what rollouts are like."""
    _, _, _, sampled, tokens, turns = np.array(observed.rollouts, np.float64).T
    given = tokens - sampled
    count = max(1, round(float(turns.mean())))
    tool_seconds: Drawn = 0.0
    if len(speed.environment):
        if count == 1:
            notes.append("workload.turns: rollouts of one turn take longer than their tokens do: two turns, and that time between them")
        count = max(2, count)
        tool_seconds = empirical(pieces(speed.environment, count - 1))
    if count > 1 and turns.min() < turns.max():
        notes.append(f"workload.turns: rollouts have {turns.min():.0f} to {turns.max():.0f} turns: {count} in all of them")
    observed_tokens = _tokens_a_turn(turns, given)
    if turns.max() > 1 and turns.min() == turns.max():
        notes.append("workload.observed_tokens: all rollouts have as many turns: what the environment answered counts as the prompt's")
    notes.append("workload: rollouts of a group are drawn as if they had nothing in common; those of a hard prompt may all be long")
    return WorkloadSection(
        tokens=empirical(sampled),
        prompt_tokens=empirical(np.maximum(given - observed_tokens * (turns - 1), 0.0)),
        turns=count,
        tool_seconds=tool_seconds,
        observed_tokens=observed_tokens,
        score_seconds=empirical(observed.scored_after) if config.environment.score and observed.scored_after else 0.0,
        zero_advantage_share=min(_MOST_ALIKE, observed.zero_advantage / max(1, observed.ready)),
        filtered_share=min(_MOST_ALIKE, observed.dropped["filtered"] / max(1, observed.ready + observed.dropped["filtered"])),
        failures=_failures(observed, notes),
    )


def _tokens_a_turn(turns: Floats, given: Floats) -> int:
    """Return by how many tokens a further turn makes a rollout longer, beside what the policy writes; 0: that cannot be told."""
    apart = turns - turns.mean()
    return max(0, round(float((apart * (given - given.mean())).sum() / (apart**2).sum()))) if apart.any() else 0


def _failures(observed: Observed, notes: list[str]) -> tuple[Failing, ...]:
    found = [(cause, observed.failed[cause]) for cause in OF_AN_ATTEMPT if observed.failed[cause]]
    attempts = len(observed.rollouts) + sum(count for _, count in found)
    if observed.failed["timeout"]:
        notes.append("workload.failures: how long rollouts that timed out would have taken is not known: they fail at any time")
    if observed.failed["score_error"]:
        share = observed.failed["score_error"] / attempts
        notes.append(f"workload.failures: {share:.1%} of the rollouts were lost to the scorer: a scenario knows no such thing")
    return tuple(Failing(cause=cause, share=count / attempts, retried=cause in observed.retried) for cause, count in found)


def fleet_of(observed: Observed, speed: Speed, config: RunConfig, notes: list[str]) -> FleetSection:
    """Return what engines are like."""
    engine = config.engine
    engines, limit = engines_of(observed, config)
    if not speed.told_apart:
        notes.append("fleet.tokens_per_second: all rollouts have as many tokens: whatever else they wait for is in it")
    if not speed.half_speed_at:
        seen = f"with {speed.in_flight:.0f} rollouts in flight per engine"
        notes.append(f"fleet.half_speed_at: no fall with the number in flight can be seen, {seen}: 0, never slower")
    notes.append("fleet.prefill_tokens_per_second: a journal does not tell prefill from decoding: 0, and its time is in the others'")
    notes.append("fleet.kv_tokens: a journal does not tell how much an engine's KV cache holds: 0, no limit")
    if not limit:
        notes.append("fleet.max_sequences: engines that the run has not launched do not tell: 0, no limit")
    paused = [sync.seconds for sync in observed.syncs]
    if not paused:
        notes.append("fleet.sync_seconds: nothing was published in the time that was measured: 0")
    return FleetSection(
        engines=engines,
        tokens_per_second=speed.tokens_per_second,
        half_speed_at=speed.half_speed_at,
        max_sequences=limit,
        sync_seconds=empirical(paused) if paused else 0.0,
        weight_sync=engine.weight_sync,
        recompute_kv=engine.recompute_kv,
        sync_order=engine.sync_order,
        on_lost=engine.on_lost,
    )


def training_of(pace: Pace, notes: list[str]) -> TrainingSection:
    """Return what the trainer is like."""
    if not pace.tokens_per_second:
        notes.append("training.tokens_per_second: that batches of more tokens take longer cannot be seen: 0, size does not matter")
    if pace.stalls:
        notes.append(f"training.seconds: {pace.stalls} batches took more than 10 times as long as usual: left out")
    return TrainingSection(seconds=pace.seconds, tokens_per_second=pace.tokens_per_second, jitter=pace.jitter)


def rollout_of(rollout: RolloutSection, notes: list[str]) -> RolloutSection:
    """Return the section that was in force, without code of the user's."""
    if rollout.filter:
        notes.append(
            "rollout.filter: a simulation runs no code of yours: any group may be refused, as many as were (workload.filtered_share)"
        )
    return msgspec.structs.replace(rollout, filter="")


def evaluation_of(observed: Observed, config: RunConfig, notes: list[str]) -> EvaluationSection | None:
    """Return the load by evaluations, as large as they were; before the first, as large as the config's prompts are, if that is known."""
    evaluation = config.eval
    if evaluation is None:
        return None
    if not observed.evaluations:
        return evaluations_of(evaluation, None, notes)
    return EvaluationSection(
        every=evaluation.every,
        prompts=max(1, round(median(observed.evaluations) / evaluation.n)),
        n=evaluation.n,
        hold_seconds=evaluation.hold_seconds,
        at_start=evaluation.at_start,
    )


def untold(observed: Observed, config: RunConfig, notes: list[str]) -> None:
    """Note what happened in the run, and a scenario that was made from it leaves out."""
    happened: Sequence[tuple[int | bool, str]] = (
        (observed.engines_lost, f"faults: engines were lost {observed.engines_lost} times: nothing goes wrong in the scenario"),
        (observed.resumes, f"faults: the run was taken up again {observed.resumes} times: nothing goes wrong in the scenario"),
        (
            10 * observed.dropped["stale"] > observed.admitted,
            "workload.tokens: more than a tenth of the groups was dropped as stale before it ended: rollouts are longer than they seem",
        ),
    )
    notes += [line for applies, line in happened if applies]
    notes += left_out(publish_every=config.trainer.publish_every, publish_lag=config.debug.publish_lag, outside=config.outside)
