"""A grid of scenarios, each simulated: `--sweep max_staleness=1,2,4,8 --sweep groups_per_batch=128,256`.

Keys are those of a scenario; one without a section is of [rollout]. The last key varies fastest. What is wrong with a value by itself
refuses the whole grid; points whose values contradict each other (a steps_ahead above max_staleness) are left out, each told in a line, so
that a grid may be a triangle. A point that fails while it is simulated is told in the same way, and the others go on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.config.nearest import unknown
from headway.config.problems import Problem, as_error
from headway.config.reading import Layer, Table, check, check_complete, completed, merged, parse_value
from headway.config.toml import shown, toml_value
from headway.errors import ConfigError, HeadwayError
from headway.planning.contradictions import scenario_contradictions
from headway.planning.scenario_file import SCENARIO, table_of
from headway.sim.scenario import Scenario
from headway.sim.summary import Interval, Summary

OPTION = "--sweep"
MOST_POINTS = 10_000
_CLOSING = {"[": "]", "{": "}"}

Grid = Mapping[str, Sequence[Any]]
"""By dotted key, the values that it takes, as TOML has them."""
Simulate = Callable[[Scenario], tuple[Summary, Sequence[Interval]]]
"""Returns the figures of a scenario, and who was at what, as far as that is to be kept."""


@dataclass(frozen=True)
class Point:
    """A point of the grid: the keys with their values here, and the scenario; None: these values contradict each other (`problem`)."""

    values: Mapping[str, Any]
    scenario: Scenario | None
    problem: str = ""

    @property
    def name(self) -> str:
        """The point as messages and pictures name it: `max_staleness=4 groups_per_batch=128`."""
        return " ".join(f"{short_name(key)}={written(value)}" for key, value in self.values.items())


@dataclass(frozen=True)
class Outcome:
    """A point and what it came to; `summary` None: it has none, for the `problem`. `intervals`: who was at what, for its timeline."""

    point: Point
    summary: Summary | None
    problem: str = ""
    intervals: Sequence[Interval] = ()


def short_name(key: str) -> str:
    """Return a key as `--sweep` may name it: without its section, where that is [rollout]."""
    return key.removeprefix("rollout.")


def written(value: Any) -> str:
    """Return a value as it was written: text without quotes."""
    return value if isinstance(value, str) else toml_value(value)


def parse_sweep(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the grid of `key=value,value` texts, several in one separated by spaces. Raises ConfigError in a line."""
    grid: dict[str, list[Any]] = {}
    for text in itertools.chain.from_iterable(_parts(text, " \t\n") for text in texts):
        name, equals, listed = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{OPTION}: {shown(text)} is not key=value,value: write it like {OPTION} max_staleness=1,2,4")
        key = _key(name.strip())
        if key in grid:
            raise ConfigError(f"{OPTION}: {key} is given twice: put all of its values into one")
        grid[key] = _values(key, listed)
    if not grid:
        raise ConfigError(f"{OPTION}: it names no key: write it like {OPTION} max_staleness=1,2,4")
    if (count := math.prod(map(len, grid.values()))) > MOST_POINTS:
        raise ConfigError(f"{OPTION}: the grid has {count:,} points, at most {MOST_POINTS:,} are simulated: leave values out")
    return grid


def points_of(base: Scenario, grid: Grid, refusal: Callable[[Scenario], str] = lambda _: "") -> list[Point]:
    """Return every point of a grid on top of a scenario, the last key varying fastest.

    `refusal`: why whoever simulates cannot do a scenario ("": it can). Raises ConfigError for values that are wrong by themselves, and when
    no point is left that can be simulated.
    """
    below = table_of(base)
    problems = []
    for key, values in grid.items():
        for value in values:
            try:
                check(SCENARIO, [Layer(OPTION, completed(SCENARIO, below, _nested(key, value)))])
            except ConfigError as error:
                problems.append(Problem(key, str(error), error.detail))
    if problems:
        raise as_error(problems)
    points = [_point(below, dict(zip(grid, values, strict=True)), refusal) for values in itertools.product(*grid.values())]
    if all(point.scenario is None for point in points):
        first = {point.problem: point for point in reversed(points)}
        raise as_error([Problem("", problem_line(point.name, point.problem)) for point in reversed(first.values())])
    return points


def problem_line(name: str, problem: str) -> str:
    """Return the line that tells what is wrong with a point."""
    return f"{OPTION}: {name}: {problem}"


def run_points(points: Sequence[Point], simulate: Simulate) -> Iterator[Outcome]:
    """Simulate point after point, and yield what each came to, also those that cannot be simulated."""
    for point in points:
        if point.scenario is None:
            yield Outcome(point, None, point.problem)
            continue
        try:
            summary, intervals = simulate(point.scenario)
        except HeadwayError as error:
            yield Outcome(point, None, str(error).partition("\n")[0])
        else:
            yield Outcome(point, summary, intervals=intervals)


def _key(name: str) -> str:
    """Return the dotted path of a key that may be named without [rollout]. Raises ConfigError with the nearest there is."""
    path = name if "." in name else f"rollout.{name}"
    section, _, last = path.rpartition(".")
    if path in SCENARIO.keys and section not in SCENARIO.lists:
        if section == "budget":
            raise ConfigError(f"{OPTION}: {path} is what a plan keeps to: a simulation does not read it")
        return path
    if section in SCENARIO.keys and SCENARIO.keys[section].tables:
        return path  # a field of a distribution: workload.tokens.sigma; it is checked with its value
    if path in SCENARIO.lists or section in SCENARIO.lists:
        raise ConfigError(f"{OPTION}: {path} is of a list of tables, which cannot be varied: simulate several scenarios")
    if path in SCENARIO.sections:
        raise ConfigError(f"{OPTION}: {path} is a section: name one of its keys, like {next(iter(SCENARIO.children(path).values()))}")
    while section and section not in SCENARIO.sections:
        section, _, last = section.rpartition(".")
    raise as_error([unknown(section, last, SCENARIO).located(OPTION)])


def _values(key: str, text: str) -> list[Any]:
    values = [parse_value(part, SCENARIO.keys.get(key), f"{OPTION}: {key}") for part in _parts(text, ",")]
    if not values:
        raise ConfigError(f"{OPTION}: {key} has no value: write it like {OPTION} {short_name(key)}=1,2,4")
    for number, value in enumerate(values):
        if value in values[:number]:
            raise ConfigError(f"{OPTION}: {key} has {shown(value)} twice: leave one out")
    return values


def _parts(text: str, separators: str) -> Iterator[str]:
    """Yield what stands between separators, those in brackets and quotes left alone; nothing that is empty."""
    part, closing, quote = "", list[str](), ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in _CLOSING:
            closing.append(_CLOSING[letter])
        elif closing and letter == closing[-1]:
            closing.pop()
        elif letter in separators and not closing:
            if part.strip():
                yield part.strip()
            part = ""
            continue
        part += letter
    if part.strip():
        yield part.strip()


def _nested(key: str, value: Any) -> Table:
    for name in reversed(key.split(".")):
        value = {name: value}
    table: Table = value
    return table


def _point(below: Table, values: Mapping[str, Any], refusal: Callable[[Scenario], str]) -> Point:
    whole = below
    for key, value in values.items():
        whole = merged(SCENARIO, whole, _nested(key, value))
    try:
        check_complete(SCENARIO, Layer("", whole))
    except ConfigError as error:
        return Point(values, None, str(error).removeprefix(": "))
    scenario = msgspec.convert(whole, Scenario)
    problems = scenario_contradictions(scenario)
    problem = problems[0].message if problems else refusal(scenario)
    return Point(values, None if problem else scenario, problem)
