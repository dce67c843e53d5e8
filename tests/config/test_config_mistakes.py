"""Every key that can be mistaken is mistaken here, in a file and on the command line alike: the keys are walked, not listed."""

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.config import load_config
from headway.config.keys import KEYS, SECTIONS, Key
from headway.config.toml import toml_value
from headway.errors import ConfigError

Refused = Callable[[str, Any], str]

VALID = """
[model]
init = {architecture = "qwen3"}
[prompts]
source = "prompts.jsonl"
[environment]
entry = "guess:attempt"
[eval]
prompts = "held_out.jsonl"
[run.finish_when]
reward_above = 0.9
"""


def by_path(keys: Any) -> Any:
    return pytest.mark.parametrize("key", keys, ids=lambda key: key.path)


@pytest.fixture(params=["file", "--set"])
def refused(request: pytest.FixtureRequest, tmp_path: Path) -> Refused:
    """Load a valid config with one key more (or changed), and return the one line it is refused with."""

    def load(path: str, value: Any) -> str:
        file = tmp_path / "run.toml"
        file.write_text(VALID)
        origin = str(file)
        overrides = []
        if request.param == "--set":
            overrides, origin = [f"{path}={toml_value(value)}"], "--set"
        else:
            table = tomllib.loads(VALID)
            *sections, name = path.split(".")
            place = table
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
            file.write_text("\n".join(f"{section} = {toml_value(keys)}" for section, keys in table.items()))
        with pytest.raises(ConfigError) as caught:
            load_config(file, overrides)
        line = str(caught.value)
        assert "\n" not in line
        assert line.startswith(f"{origin}: ")
        return line.removeprefix(f"{origin}: ")

    return load


def test_the_walk_finds_every_section_and_key() -> None:
    assert {
        "run",
        "run.finish_when",
        "model",
        "model.init",
        "rollout",
        "prompts",
        "environment",
        "engine",
        "trainer",
        "eval",
        "metrics",
        "replay",
        "ingest",
        "debug",
    } == set(SECTIONS)
    assert {"rollout.max_staleness", "model.init.head_dim", "run.finish_when.over_batches", "trainer.betas"} < set(KEYS)


@by_path(KEYS.values())
def test_a_misspelt_key_is_refused_with_the_right_one(key: Key, refused: Refused) -> None:
    name, middle = key.name, len(key.name) // 2
    dropped_first, dropped_last, doubled = name[1:], name[:-1], name + name[-1]
    swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    for misspelt in {dropped_first, dropped_last, doubled, swapped} if len(name) > 2 else {doubled}:
        if misspelt != name:
            line = refused(f"{key.section}.{misspelt}", 1)
            assert line.startswith(f"{key.section}.{misspelt}: no such key; did you mean ")
            assert key.path in line


@by_path(KEYS.values())
def test_a_key_in_the_wrong_case_is_refused_with_the_right_one(key: Key, refused: Refused) -> None:
    assert refused(f"{key.section}.{key.name.title()}", 1) == f"{key.section}.{key.name.title()}: no such key; did you mean {key.path}?"


@by_path([key for key in KEYS.values() if "_" in key.name])
def test_a_key_with_hyphens_is_refused_with_the_right_one(key: Key, refused: Refused) -> None:
    hyphenated = f"{key.section}.{key.name.replace('_', '-')}"
    assert refused(hyphenated, 1) == f"{hyphenated}: no such key; did you mean {key.path}?"


def wrong_places() -> Iterator[tuple[Key, str]]:
    for key in KEYS.values():
        for section in SECTIONS:
            if f"{section}.{key.name}" not in KEYS and f"{section}.{key.name}" not in SECTIONS:
                yield key, section


@by_path(KEYS.values())
def test_a_key_in_the_wrong_section_is_refused_with_its_place(key: Key, refused: Refused) -> None:
    for found, section in wrong_places():
        if found is key:
            line = refused(f"{section}.{key.name}", 1)
            assert line.startswith(f"{section}.{key.name}: no such key; did you mean ")
            assert key.path in line


@pytest.mark.parametrize("section", [path for path in SECTIONS if "." not in path])
def test_a_misspelt_section_is_refused_with_the_right_one(section: str, refused: Refused) -> None:
    for wrong in (section.title(), section[:-1], f"{section}s"):
        if wrong not in SECTIONS:
            assert refused(wrong, {}) == f"{wrong}: no such section; did you mean [{section}]?"


def test_a_key_at_the_top_of_the_file_is_sent_to_its_section(refused: Refused) -> None:
    assert refused("max_staleness", 2) == "max_staleness: no such section; did you mean rollout.max_staleness?"


def test_a_key_like_no_other_is_answered_with_the_keys_that_there_are(refused: Refused) -> None:
    line = refused("metrics.wandb", 1)
    assert line == "metrics.wandb: no such key; there are interval_seconds, progress, exporters"


@by_path([key for key in KEYS.values() if key.choices])
def test_a_value_outside_a_closed_choice_is_refused_with_the_choices(key: Key, refused: Refused) -> None:
    for wrong in ("wrong", key.choices[0].upper(), 1, True):
        line = refused(key.path, wrong)
        assert line.startswith(f"{key.path} is ")
        assert all(f'"{choice}"' in line for choice in key.choices)


def outside(key: Key) -> Iterator[float]:
    step = 1 if key.plain is int else 1e-9
    at_least, above, at_most, below = (key.limit(kind) for kind in ("ge", "gt", "le", "lt"))
    yield from (limit for limit in (above, below) if limit is not None)
    if at_least is not None:
        yield at_least - step
    if at_most is not None:
        yield at_most + step


@by_path([key for key in KEYS.values() if list(outside(key))])
def test_a_number_just_outside_its_range_is_refused_with_the_range_and_its_meaning(key: Key, refused: Refused) -> None:
    for number in outside(key):
        line = refused(key.path, key.plain(number))
        assert line == f"{key.path} is {key.plain(number)}: it must be {key.range} ({key.meaning_of_limit}){key.or_words}"


@by_path([key for key in KEYS.values() if key.plain in {int, float, bool}])
def test_a_value_of_another_type_is_refused_with_the_right_type(key: Key, refused: Refused) -> None:
    noun = {int: "a whole number", float: "a number", bool: "true or false"}[key.plain]
    for wrong in ("text", [1], {"a": 1}, *((True,) if key.plain is not bool else (1,)), *((1.5,) if key.plain is int else ())):
        line = refused(key.path, wrong)
        assert line.startswith(f"{key.path} is {toml_value(wrong)}: it must be {noun}")


@by_path([key for key in KEYS.values() if key.plain is float])
def test_a_number_that_is_not_finite_is_refused(key: Key, refused: Refused) -> None:
    for wrong in (float("nan"), float("inf"), float("-inf")):
        assert refused(key.path, wrong).startswith(f"{key.path} is {wrong}: it must be ")


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_that_is_no_table_is_refused(section: str, refused: Refused) -> None:
    assert refused(section, 3) == f"{section} is 3: it must be a table: write its keys under [{section}]"


def test_the_design_documents_example_reads_as_promised(refused: Refused) -> None:
    assert refused("rollout.max_staleness", -1) == "rollout.max_staleness is -1: it must be 0 or more (0 trains on-policy, synchronously)"
    assert refused("rollout.learning_rate", 1.0) == "rollout.learning_rate: no such key; did you mean trainer.learning_rate?"


def test_a_number_beyond_64_bits_is_refused(refused: Refused) -> None:
    assert refused("run.seed", 2**63).endswith("it must fit into 64 bits")
