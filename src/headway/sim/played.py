"""What is left of a scenario that was played: the run's own history, and what only whoever stood beside it could note.

Figures are of the *window*: from the moment in which the last batch of the warm-up was trained (0.0: there is no warm-up) until batch
`run.steps - 1` was, as far as the run knew. The play ends at that instant, with rollouts in flight, the gate as open as ever and nothing
drained: the run was given more steps than are played, so that no end cast its shadow over admission. Times are virtual seconds from the
start of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.sim.run import SimResult
from headway.sim.scenario import Scenario
from headway.sim.summary import Interval


@dataclass(frozen=True, kw_only=True)
class Played:
    """A scenario and how it went.

    `result`: `result.events` is the whole history until `end`; `result.batches[k]` (`KeptBatch`) and the rows of `result.rows["metrics"]`
    (by "batch") are of the batches, some of them written and not trained yet at the end: k < run.steps are all trained.
    `warm_up`: batches before the window. `start`, `end`: the window.

    `trainer`, `engines`, `gate`: without gaps from 0.0 to `end`, states as `Interval` says. `why` of a trainer that waits: what
    `rules.batching.trainer_waits_for` says without its figures ("rollouts", "a batch to be written", ...), "stalled" or "lost" for a
    fault, "the orchestrator is down". Of an engine that idles: "environments" when rollouts are there and none of them generates,
    otherwise the gate's reason of that time ("open": it was open, and rollouts were on their way). Of a paused one: "weight sync". Of a
    closed gate: its `rules.admission.CapacityReason`, or "the orchestrator is down".

    In the window: `in_flight_mean`, `in_flight_max` of the training rollouts in flight; `ready_groups_max`; `waiting_bytes_max`, by
    12 bytes a token, of finished rollouts whose batch is not formed yet; `sequences`: by engine, how many it had under way on average,
    those that waited for room included, and none while it was paused;
    `preemptions`: sequences that engines put back for want of room.

    `sampled`: tokens that engines wrote in the window. `undelivered`: (time, tokens) of attempts that ended and had written more than
    they delivered: cut short, timed out, or written again elsewhere after their engine died. `in_progress`: tokens that at `end` were
    written for attempts under way; with what an unfinished evaluation had received (`eval_in_progress`) all that was ever sampled is
    accounted for: result.sampled_tokens = tokens of Finished, of RolloutDropped that are not `finished` and of EvalFinished
    + undelivered + in_progress + eval_in_progress.
    """

    scenario: Scenario
    result: SimResult
    warm_up: int
    start: float
    end: float
    trainer: Sequence[Interval]
    engines: Mapping[str, Sequence[Interval]]
    gate: Sequence[Interval]
    in_flight_mean: float
    in_flight_max: int
    ready_groups_max: int
    waiting_bytes_max: int
    sequences: Mapping[str, float]
    preemptions: int
    sampled: int
    undelivered: Sequence[tuple[float, int]]
    in_progress: int
    eval_in_progress: int
