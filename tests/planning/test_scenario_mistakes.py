"""Every key of a scenario that can be mistaken is mistaken here: the keys are walked, not listed."""

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from headway.config.keys import Key
from headway.config.kinds import EXAMPLES, example_of
from headway.config.toml import toml_value
from headway.errors import ConfigError
from headway.planning.scenario_file import SCENARIO, load_scenario

VALID = """
[workload]
tokens = {kind = "lognormal", mean = 800, sigma = 1}
[[workload.failures]]
cause = "environment_error"
share = 0.1
[training]
seconds = 30
[eval]
prompts = 8
[[faults]]
at_seconds = 60
what = "engine_dies"
"""
KEYS = list(SCENARIO.keys.values())
DISTRIBUTIONS = [key for key in KEYS if key.tables]


def by_path(keys: Any) -> Any:
    return pytest.mark.parametrize("key", keys, ids=lambda key: key.path)


@pytest.fixture
def refused(tmp_path):
    """Load a valid scenario with one key more (or changed); return the lines it is refused with, without their place."""

    def load(path: str, value: Any) -> list[str]:
        table = tomllib.loads(VALID)
        *sections, name = path.split(".")
        place: Any = table
        for section in sections:
            place = place.setdefault(section, {})
            place = place[0] if isinstance(place, list) else place
        place[name] = value
        file = tmp_path / "scenario.toml"
        file.write_text("\n".join(f"{section} = {toml_value(keys)}" for section, keys in table.items()))
        with pytest.raises(ConfigError) as caught:
            load_scenario(file)
        lines = [str(caught.value), *caught.value.detail.splitlines()]
        assert all(line.startswith(f"{file}: ") for line in lines)
        return [line.removeprefix(f"{file}: ") for line in lines]

    return load


def shown(path: str) -> str:
    """A key as messages name it: the tables of a list are counted."""
    for section in sorted(SCENARIO.lists):
        path = path.replace(f"{section}.", f"{section}[0].")
    return path


def test_what_is_mistaken_is_a_scenario(tmp_path):
    file = tmp_path / "scenario.toml"
    file.write_text(VALID)
    assert load_scenario(file).faults[0].what == "engine_dies"


@by_path(KEYS)
def test_a_misspelt_key_is_refused_with_the_right_one(key: Key, refused):
    name, middle = key.name, len(key.name) // 2
    doubled, swapped = name + name[-1], name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    for misspelt in {doubled, swapped} if len(name) > 2 else {doubled}:
        if misspelt != name:
            (line,) = refused(f"{key.section}.{misspelt}", 1)
            assert line.startswith(f"{shown(f'{key.section}.{misspelt}')}: no such key; did you mean ")
            assert key.path in line


@by_path([key for key in KEYS if key.choices])
def test_a_value_outside_a_closed_choice_is_refused_with_the_choices(key: Key, refused):
    (line,) = refused(key.path, "wrong")
    assert line.startswith(f'{shown(key.path)} is "wrong": it must be ')
    assert all(f'"{choice}"' in line for choice in key.choices)


def outside(key: Key) -> Iterator[float]:
    step = 1 if key.plain is int else 1e-9
    yield from (limit for kind in ("gt", "lt") if (limit := key.limit(kind)) is not None)
    yield from (limit - step for limit in [key.limit("ge")] if limit is not None)
    yield from (limit + step for limit in [key.limit("le")] if limit is not None)


@by_path([key for key in KEYS if list(outside(key))])
def test_a_number_just_outside_its_range_is_refused_with_the_range(key: Key, refused):
    for number in outside(key):
        assert refused(key.path, key.plain(number))[0].startswith(f"{shown(key.path)} is {key.plain(number)}: it must be {key.range} (")


@by_path([key for key in KEYS if key.plain in {int, float}])
def test_a_value_of_another_type_is_refused_with_the_right_type(key: Key, refused):
    noun = "a whole number" if key.plain is int else "a number"
    for wrong in ("text", [1], True):
        (line,) = refused(key.path, wrong)
        assert line.startswith(f"{shown(key.path)} is {toml_value(wrong)}: it must be {noun}")


@pytest.mark.parametrize("section", SCENARIO.sections)
def test_a_section_that_is_no_table_is_refused(section, refused):
    noun = "a list of tables: write each under" if section in SCENARIO.lists else "a table: write its keys under"
    (line,) = refused(section, 3)
    assert line == f"{section} is 3: it must be {noun} {SCENARIO.heading(section)}"


# ---- distributions


def test_a_name_for_a_distribution_is_refused_with_how_one_is_written(refused):
    (line,) = refused("workload.tokens", "lognormal")
    assert line == 'workload.tokens is "lognormal": it must be a number or a table like {kind = "lognormal", mean = 30, sigma = 1}'


@by_path(DISTRIBUTIONS)
@pytest.mark.parametrize("kind", EXAMPLES)
def test_every_kind_is_taken_by_every_key_and_a_lack_of_each_field_is_told(key: Key, kind, tmp_path):
    file = tmp_path / "scenario.toml"
    file.write_text(VALID)
    unit = ["workload.tokens=1"] if key.name == "seconds" and key.section == "training" else []
    load_scenario(file, [*unit, f"{key.path}={example_of(kind)}"])
    for field in EXAMPLES[kind]:
        table = {"kind": kind, **{name: value for name, value in EXAMPLES[kind].items() if name != field}}
        with pytest.raises(ConfigError) as caught:
            load_scenario(file, [*unit, f"{key.path}={toml_value(table)}"])
        assert str(caught.value) == f"--set: {key.path}.{field} is missing: a {kind} is written like {example_of(kind)}"


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_kind_or_a_field_of_one_that_is_misspelt_is_refused_with_the_right_one(kind, refused):
    (line,) = refused("workload.tokens", {"kind": kind[:-1], **EXAMPLES[kind]})
    assert line == f'workload.tokens.kind is "{kind[:-1]}": no such kind; did you mean "{kind}"?'
    for field, value in EXAMPLES[kind].items():
        others = {name: other for name, other in EXAMPLES[kind].items() if name != field}
        first, *_ = refused("workload.tokens", {"kind": kind, field[:-1]: value, **others})
        assert first == f'workload.tokens.{field[:-1]}: no such key of kind "{kind}"; did you mean {field}?'


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"kind": "lognormal", "mean": -3, "sigma": 1}, '.mean is -3: of kind "lognormal" it must be above 0'),
        (
            {"kind": "lognormal", "mean": 3, "sigma": "x"},
            '.sigma is "x": of kind "lognormal" it must be a number, 0 or more and at most 10',
        ),
        ({"kind": "lognormal", "mean": 3, "sigma": 11}, '.sigma is 11: of kind "lognormal" it must be 0 or more and at most 10'),
        ({"kind": "pareto", "mean": 3, "shape": 0.9}, ": pareto: shape is 0.9: it must be above 1, or the mean does not exist"),
        ({"kind": "uniform", "low": 3, "high": 2}, ": uniform: high is 2: it must be at least low, 3"),
        ({"kind": "fixed", "value": float("inf")}, '.value is inf: of kind "fixed" it must be a finite number'),
        (
            {"kind": "empirical", "values": []},
            '.values is []: of kind "empirical" it must be a list like [21.5, 30.1, 28.9], with at least one entry',
        ),
        ({"kind": "empirical", "values": [1, -2]}, '.values[1] is -2: of kind "empirical" it must be 0 or more'),
        (
            {"kind": "mixture", "parts": [[0, {"kind": "fixed", "value": 1}]]},
            '.parts[0], its weight, is 0: of kind "mixture" it must be above 0',
        ),
        (
            {"kind": "mixture", "parts": [[1, 2]]},
            '.parts[0] is [1, 2]: of kind "mixture" it must be a weight and a table, like [0.9, {kind = "fixed", value = 25}]',
        ),
        (
            {"kind": "mixture", "parts": [[1, {"kind": "pareto", "mean": 3, "shape": 1}]]},
            ".parts[0]: pareto: shape is 1: it must be above 1, or the mean does not exist",
        ),
        ({"mean": 3}, ' is {mean = 3}: its kind is missing; there are "fixed", "uniform", "lognormal", "pareto", "empirical", "mixture"'),
        ({"kimd": "fixed"}, ".kimd: no such key; did you mean kind?"),
        ({"kind": 3}, '.kind is 3: no such kind; there are "fixed", "uniform", "lognormal", "pareto", "empirical", "mixture"'),
    ],
)
def test_what_is_wrong_with_a_distribution_is_told_by_kind_and_field(table, line, refused):
    assert refused("workload.tokens", table) == [f"workload.tokens{line}"]


@pytest.mark.parametrize("depth", [9, 30, 5000])
def test_mixtures_of_mixtures_end_somewhere(depth):
    text = '{kind = "mixture", parts = [[1, ' * depth + '{kind = "fixed", value = 3}' + "]]}" * depth
    with pytest.raises(ConfigError) as caught:
        load_scenario(None, ["training.seconds=1", f"workload.tokens={text}"])
    assert str(caught.value).startswith("--set: workload.tokens")
    assert len(str(caught.value)) < 400
    assert depth > 30 or str(caught.value).endswith("it is nested too deep")


def test_a_missing_key_of_a_list_is_told_with_its_place_and_an_example(tmp_path):
    file = tmp_path / "scenario.toml"
    file.write_text(VALID + "[[faults]]\nat_seconds = 3\n")
    with pytest.raises(ConfigError) as caught:
        load_scenario(file)
    line = str(caught.value)
    assert line.startswith(f"{file}: faults[1].what is missing (")
    assert line.endswith('add under [[faults]]: what = "engine_dies"')


def test_every_required_key_has_an_example_and_every_key_a_meaning():
    for key in KEYS:
        assert key.description, key.path
        assert key.example is not None or not key.required, key.path
