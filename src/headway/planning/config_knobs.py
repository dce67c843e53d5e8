"""What a run's config says of a scenario: its [rollout], how its engines take weights and are lost, how it evaluates.

What else the scenario says is the world, and stays. What a config says and a scenario does not know is told, one line each.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headway.planning.evaluations import evaluations_of
from headway.settings import Config
from headway.sim.scenario import EvaluationSection, Scenario


def under(scenario: Scenario, config: Config, notes: list[str]) -> Scenario:
    """Return the scenario with what is a config's (as `load_config` returns it) in the place of its own; notes say what is assumed.

    What a simulation does not run (a filter) is left out. The number of engines is the config's, where it starts or names them.
    """
    engine = config.engine
    count = len(engine.urls) or (engine.count if engine.launch != "none" else scenario.fleet.engines)
    fleet = msgspec.structs.replace(
        scenario.fleet,
        engines=count,
        weight_sync=engine.weight_sync,
        recompute_kv=engine.recompute_kv,
        sync_order=engine.sync_order,
        on_lost=engine.on_lost,
    )
    if config.rollout.filter:
        notes.append("rollout.filter: a simulation runs no code of yours: it refuses as many groups as workload.filtered_share says")
    notes += left_out(
        publish_every=config.trainer.publish_every,
        publish_lag=config.debug.publish_lag,
        outside=config.replay is not None or config.ingest is not None,
    )
    rollout = msgspec.structs.replace(config.rollout, filter="")
    return msgspec.structs.replace(scenario, rollout=rollout, fleet=fleet, eval=_evaluations(scenario.eval, config, notes))


def left_out(*, publish_every: int, publish_lag: int, outside: bool) -> Iterator[str]:
    """Yield what a scenario does not know of a config: versions that are not served, rollouts from elsewhere (`outside`)."""
    if outside:
        yield "rollout: rollouts from elsewhere (replay, ingest) are left out: all are this run's own"
    if publish_every > 1:
        yield f"trainer.publish_every = {publish_every} is left out: all versions are served"
    if publish_lag:
        yield f"debug.publish_lag = {publish_lag} is left out"


def _evaluations(given: EvaluationSection | None, config: Config, notes: list[str]) -> EvaluationSection | None:
    if config.eval is not None:
        return evaluations_of(config.eval, given.prompts if given is not None else None, notes)
    if given is not None:
        notes.append("eval: the config has none, whatever the world that is planned for has")
    return None
