"""`headway plan`: what to set for a world that is given or was measured, and what to think of a config that is set already."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.cli.measuring import NO_RUN, FromRun, measured_world
from headway.cli.streams import say
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.planning.confirm import Simulate
    from headway.sim.scenario import Scenario
    from headway.sim.summary import Summary

INTERRUPTED_CODE = 130


def plan_scenario(
    path: Path | None, *, config: Path | None, from_run: FromRun, overrides: Sequence[str], as_json: bool, simulates: bool
) -> int:
    """Plan, or judge `config`, and print; return the exit code. Raises HeadwayError."""
    if path is None and from_run == NO_RUN and not overrides:
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


def _scenario(path: Path | None, config: Path | None, from_run: FromRun, overrides: Sequence[str]) -> tuple[Scenario, str, tuple[str, ...]]:
    """Return the world and the knobs, what it is called, and what of it is assumed: the run's, then the file's, then --set on top.

    A config that is judged comes between: its keys are above those of the world, and below --set.
    """
    from headway.planning.scenario_file import load_scenario

    found = measured_world(from_run)
    base = found.scenario if found is not None else None
    assumed = list(found.notes) if found is not None else []
    name = path.stem if path is not None else "what --set says" if from_run.path is None else str(from_run.path)
    called = str(from_run.path) if found is not None else "scenario"
    if config is None:
        return load_scenario(path, overrides, base, called=called), name, tuple(assumed)
    from headway.config import load_config
    from headway.planning.config_knobs import under

    knobs = load_config(config)
    of_the_world = [text for text in overrides if not text.lstrip().startswith("rollout")]
    world = load_scenario(path, of_the_world, base, called=called)
    judged = under(world, knobs, assumed)
    return load_scenario(None, overrides, judged, called=str(config)), name, tuple(dict.fromkeys(assumed))
