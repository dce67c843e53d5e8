"""`headway plan`: what to set for a world that is given or was measured, and what to think of a config that is set already."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.cli.streams import say
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.planning.confirm import Simulate
    from headway.settings import Config
    from headway.sim.scenario import Scenario
    from headway.sim.summary import Summary

INTERRUPTED_CODE = 130


def plan_scenario(
    path: Path | None, *, config: Path | None, from_run: Path | None, overrides: Sequence[str], as_json: bool, simulates: bool
) -> int:
    """Plan, or judge `config`, and print; return the exit code. Raises HeadwayError."""
    if path is None and from_run is None and not overrides:
        raise ConfigError(
            "plan: name a scenario (its keys: headway scenario-reference) or a run: headway plan SCENARIO.toml, --from-run RUN"
        )
    scenario, name, assumed = _scenario(path, config, from_run, overrides)
    simulate = _simulator() if simulates else None
    try:
        if config is None:
            _tell_plan(name, scenario, assumed, simulate, as_json=as_json)
        else:
            _tell_judgement(config.name, scenario, assumed, simulate, as_json=as_json)
    except KeyboardInterrupt:
        with suppress(OSError):
            print("headway: interrupted", file=sys.stderr)
        return INTERRUPTED_CODE
    return 0


def _simulator() -> Simulate:
    """Return what simulates, with a line on a terminal that says how far it is."""
    from headway.cli.simulate import Progress
    from headway.planning.confirm import simulated

    def simulate(scenario: Scenario) -> Summary | None:
        progress: list[Progress] = []

        def watch(batches: int) -> Callable[[int], None]:
            progress.append(Progress(batches))
            return progress[-1].tell

        try:
            return simulated(scenario, watch=watch)
        finally:
            for line in progress:
                line.clear()

    return simulate


def _tell_plan(name: str, scenario: Scenario, assumed: Sequence[str], simulate: Simulate | None, *, as_json: bool) -> None:
    from headway.planning.advice import recommend
    from headway.planning.plan_text import plan_text

    plan = recommend(scenario, simulate)
    say(_json(plan, assumed) if as_json else plan_text(name, scenario, plan, assumed))


def _tell_judgement(name: str, scenario: Scenario, assumed: Sequence[str], simulate: Simulate | None, *, as_json: bool) -> None:
    from headway.planning.judge import judge
    from headway.planning.plan_text import judgement_text

    judgement = judge(scenario, simulate)
    say(_json(judgement, assumed) if as_json else judgement_text(name, scenario, judgement, assumed))


def _json(report: object, assumed: Sequence[str]) -> str:
    from headway.formats.files import strict_json

    return strict_json({**msgspec.to_builtins(report, str_keys=True), "assumed": list(assumed)}).decode().rstrip()


def _scenario(
    path: Path | None, config: Path | None, from_run: Path | None, overrides: Sequence[str]
) -> tuple[Scenario, str, tuple[str, ...]]:
    """Return the world and the knobs, what it is called, and what of it is assumed: the run's, then the file's, then --set on top."""
    from headway.planning.scenario_file import load_scenario

    base: Scenario | None = None
    assumed: tuple[str, ...] = ()
    if from_run is not None:
        from headway.planning.measured import measured
        from headway.reports.run_files import open_run

        found = measured(open_run(from_run))
        base, assumed = found.scenario, found.notes
    loaded = _loaded(config)
    if base is not None and loaded is not None:
        base = _under(base, loaded)
    scenario = load_scenario(path, overrides, base, called=str(from_run) if from_run is not None else "scenario")
    if base is None and loaded is not None:
        scenario = load_scenario(None, overrides, _under(scenario, loaded), called=str(config))
    name = path.stem if path is not None else str(from_run) if from_run is not None else "what --set says"
    return scenario, name, assumed


def _loaded(config: Path | None) -> Config | None:
    if config is None:
        return None
    from headway.config import load_config

    return load_config(config)


def _under(scenario: Scenario, config: Config) -> Scenario:
    """Return the scenario with the keys of a config that are its own: [rollout], and how engines take weights and are lost.

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
    return msgspec.structs.replace(scenario, rollout=msgspec.structs.replace(config.rollout, filter=""), fleet=fleet)
