"""From a TOML file to a `Scenario`, or to one line that says what is wrong, where, and what to do.

The errors are those of configs (`headway.config.reading`): every mistake of a file in one reading, each with the nearest key. Measured
values may lie in a file of their own, one number a line: `{kind = "empirical", file = "latencies.csv"}`, relative to the scenario.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.config.keys import Schema
from headway.config.problems import Problem, as_error
from headway.config.reading import (
    OVERRIDE,
    Layer,
    Table,
    check,
    check_complete,
    completed,
    found_at,
    leaves,
    merged,
    parse,
    parse_overrides,
    read_text,
)
from headway.config.toml import shown, toml_value
from headway.errors import ConfigError
from headway.planning.contradictions import scenario_contradictions
from headway.sim.scenario import Scenario

SCENARIO = Schema(Scenario)
MAX_BYTES = 64 * 1024**2  # measured values are many
_LENGTHS = ("tokens", "seconds")  # of [workload]: the same in two units


def load_scenario(path: Path | None, overrides: Sequence[str] = (), base: Scenario | None = None, *, called: str = "scenario") -> Scenario:
    """Return the scenario in `path` with `key=value` overrides on top, both on top of `base`, if there is one (what was measured).

    Files of values start at the scenario file, those of overrides in the working directory. `called`: what messages name where there is no
    `path`. Raises ConfigError for a file that cannot be read and for everything that is wrong with the values.
    """
    origin = called if path is None else str(path)
    below = {} if base is None else table_of(base)
    table = {} if path is None else parse(path, "scenario", MAX_BYTES)
    over = completed(SCENARIO, merged(SCENARIO, below, table), parse_overrides(SCENARIO, overrides))
    problems = [problem.located(origin) for problem in _fill_in(table, Path() if path is None else path.parent)]
    problems += [problem.located(OVERRIDE) for problem in _fill_in(over, Path())]
    if problems:
        raise as_error(problems)
    table = completed(SCENARIO, below, table)
    check(SCENARIO, [Layer(origin, table), Layer(OVERRIDE, over)])
    whole = _upon(_upon(below, table), over)
    for section in ("workload", "training"):
        whole.setdefault(section, {})  # what they lack is told by what it would be for
    check_complete(SCENARIO, Layer(origin, whole))
    scenario = msgspec.convert(whole, Scenario)
    overridden = set(leaves(SCENARIO, over))
    found = [(problem, problem.key.partition("[")[0] in overridden) for problem in scenario_contradictions(scenario)]
    if found:
        raise as_error([problem.located(OVERRIDE if from_override else origin) for problem, from_override in found])
    return scenario


def table_of(scenario: Scenario) -> Table:
    """Return a scenario as the table that TOML writes; what is unset is left out."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items() if inner is not None}
        return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    table: Table = plain(msgspec.to_builtins(scenario))
    return table


def scenario_text(scenario: Scenario) -> str:
    """Return the whole scenario, defaults included, as TOML that `load_scenario` reads back to an equal one."""
    table = table_of(scenario)
    tables = ["# The whole scenario: every key that was in force, defaults included.\n"]
    tables += [f"{name} = {toml_value(value)}\n" for name, value in table.items() if not isinstance(value, dict)]
    for section, values in table.items():
        if isinstance(values, dict):
            tables.append("\n".join([f"[{section}]", *(f"{name} = {toml_value(value)}" for name, value in values.items()), ""]))
    return "\n".join(tables)


def _upon(below: Table, over: Table) -> Table:
    """Return a table with another on top; a length that is given above takes the place of one in the other unit."""
    given = [name for name in _LENGTHS if found_at(over, f"workload.{name}") is not None]
    if len(given) == 1 and isinstance(below.get("workload"), dict):
        below = {
            **below,
            "workload": {name: value for name, value in below["workload"].items() if name not in _LENGTHS or name == given[0]},
        }
    return merged(SCENARIO, below, over)


def _fill_in(table: Table, base: Path) -> Iterator[Problem]:
    """Put the values of files into the tables that name them, in place; yield what is wrong with those files."""
    for path, key in SCENARIO.keys.items():
        section = found_at(table, key.section)
        if key.tables and isinstance(section, dict) and isinstance(section.get(key.name), dict):
            section[key.name], problems = _filled_in(section[key.name], path, base)
            yield from problems


def _filled_in(value: Table, place: str, base: Path) -> tuple[Table, list[Problem]]:
    if value.get("kind") == "mixture" and isinstance(value.get("parts"), list):
        parts, problems = [], []
        for number, part in enumerate(value["parts"]):
            if isinstance(part, list) and len(part) == 2 and isinstance(part[1], dict):
                inner, found = _filled_in(part[1], f"{place}.parts[{number}]", base)
                parts.append([part[0], inner])
                problems += found
            else:
                parts.append(part)
        return {**value, "parts": parts}, problems
    if value.get("kind") != "empirical" or "file" not in value:
        return value, []
    if "values" in value:
        return value, [Problem(place, f"{place} has values and a file of them: keep one")]
    if not isinstance(value["file"], str) or not value["file"]:
        return value, [Problem(place, f'{place}.file is {shown(value["file"])}: it must name a file, like "latencies.csv"')]
    try:
        numbers = read_values(base / Path(value["file"]).expanduser())
    except ConfigError as error:
        return value, [Problem(place, f"{place}.file: {error}")]
    return {**{name: inner for name, inner in value.items() if name != "file"}, "values": numbers}, []


def read_values(path: Path) -> list[float]:
    """Return the numbers of a file with one a line; empty lines and those that begin with # are skipped. Raises ConfigError."""
    text = read_text(path, "values", MAX_BYTES)
    numbers = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        try:
            value = float(stripped)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{path}: line {number} is {shown(stripped)}: it must be one number, 0 or more")
        numbers.append(value)
    if not numbers:
        raise ConfigError(f"{path}: it holds no number")
    return numbers
