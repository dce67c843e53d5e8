"""A scenario from a real run: what its journal, its rows and its config tell of its world (`--from-run`), and what they do not tell.

    scenario = measured(open_run(path)).scenario

What cannot be told stays at its default and is listed in `notes`, one line each: a plan says what it assumes. The first batches are left
out: a run that has just begun compiles, fills its pipeline, and is like no other time of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec

from headway.errors import ConfigError
from headway.planning.engine_speed import speed_of
from headway.planning.measured_sections import engines_of, evaluation_of, fleet_of, rollout_of, training_of, untold, workload_of
from headway.planning.observed import acknowledged, batch_tokens, observe, trained_at
from headway.planning.run_config import run_config
from headway.planning.trainer_speed import pace_of
from headway.reports.run_files import RunFiles, sane
from headway.settings import steps_ahead
from headway.sim.scenario import Scenario

_FEWEST_BATCHES = 5
_FEWEST_ROLLOUTS = 20
_NOTHING = "{path}: its journal holds no batch that was trained: there is nothing to measure yet"


class Measured(msgspec.Struct, frozen=True):
    """The scenario, what in it is assumed and not measured, and the time that was measured: `since` .. `until`, `batches` batches."""

    scenario: Scenario
    notes: tuple[str, ...]
    since: float
    until: float
    batches: int


def between(run: RunFiles, first: int | None, end: int | None) -> tuple[float | None, float | None]:
    """Return the time in which the batches from `first` on (--from-batch) and before `end` (--until-batch) were trained; None: not given.

    Raises ConfigError, in one line, for a batch that the run has not trained and where none lies between; StorageError for damage.
    """
    if first is None and end is None:
        return None, None
    with sane(run.state):
        times = trained_at(run.events())
    path = run.directory.path
    if not times:
        raise ConfigError(_NOTHING.format(path=path))
    oldest, newest = min(times), max(times)
    if first is not None and first not in times:
        raise ConfigError(f"{path}: --from-batch {first}: batches {oldest} to {newest} were trained")
    if end is None:
        return times[first] if first is not None else None, None
    if end <= (oldest if first is None else first):
        raise ConfigError(f"{path}: --until-batch {end}: no batch is before it and from {oldest if first is None else first} on")
    if end - 1 not in times:
        raise ConfigError(f"{path}: --until-batch {end}: batches {oldest} to {newest} were trained: at most {newest + 1}")
    return times[first] if first is not None else None, times[end - 1]


def measured(run: RunFiles, *, since: float | None = None, until: float | None = None) -> Measured:
    """Read a run; `since`, `until` (Unix seconds): of this part of it only.

    Raises ConfigError, in one line, when there is too little to measure; StorageError when a file is damaged.
    """
    with sane(run.state):
        begin, end = _window(run, acknowledged(run.events()), since, until)
        observed = observe(run.events(), begin, end)
    if len(observed.trained) < _FEWEST_BATCHES or len(observed.rollouts) < _FEWEST_ROLLOUTS:
        without = ", the first batches left out," if since is None else ""
        raise ConfigError(
            f"{run.directory.path}: in the time to be measured{without} {len(observed.trained)} batches and "
            f"{len(observed.rollouts)} rollouts ended: at least {_FEWEST_BATCHES} and {_FEWEST_ROLLOUTS} are needed: measure a longer run"
        )
    config = run_config(run)
    engines, limit = engines_of(observed, config)
    speed = speed_of(observed, engines=engines, max_sequences=limit, pauses=config.engine.weight_sync != "wait")
    with sane(run.directory.metrics_jsonl):
        pace = pace_of(observed.trained, batch_tokens(run.batches()))
    notes: list[str] = []
    scenario = Scenario(
        workload=workload_of(observed, speed, config, notes),
        fleet=fleet_of(observed, speed, config, notes),
        training=training_of(pace, notes),
        rollout=rollout_of(run.rollout, notes),
        eval=evaluation_of(observed, config, notes),
    )
    untold(observed, config, notes)
    return Measured(scenario, tuple(notes), begin, end, len(observed.trained))


def _window(run: RunFiles, times: Sequence[float], since: float | None, until: float | None) -> tuple[float, float]:
    """Return the time to be measured. Unless said otherwise it ends with the last batch, and the first batches are left out."""
    path = run.directory.path
    if not times:
        raise ConfigError(_NOTHING.format(path=path))
    end = times[-1] if until is None else until
    before = [time for time in times if time <= end]
    if since is None and before:
        since = before[min(ceil(steps_ahead(run.rollout)) + 3, len(before) // 4)]
    if since is None or since > end:
        raise ConfigError(f"{path}: no batch was trained in the time to be measured: it ends too early, or before it begins")
    return since, end
