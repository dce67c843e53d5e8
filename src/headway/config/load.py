"""Read a TOML file and `--set` values into a `Config`: every mistake found in one reading, each told in one line."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.config.contradictions import ENTRY, contradictions
from headway.config.engines import launch_beside_urls
from headway.config.keys import KEYS, SECTIONS, Key, children
from headway.config.nearest import unknown
from headway.config.problems import Problem, as_error
from headway.config.toml import shown, toml_value
from headway.errors import ConfigError, StorageError
from headway.formats.bounded import read_bounded
from headway.settings import Config

OVERRIDE = "--set"
MAX_CONFIG_BYTES = 1024**2

Table = dict[str, Any]


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config in `path`, with `key=value` overrides on top.

    Paths of models, prompts and engines are returned absolute: relative ones start at the config file, those of overrides in the working
    directory.
    Raises ConfigError for a file that cannot be read and for everything that can be known to be wrong from the values alone.
    """
    origin = str(path)
    table, override_table = _parse(path), _parse_overrides(overrides)
    problems = [problem.located(origin) for problem in _mistakes(table)]
    problems += [problem.located(OVERRIDE) for problem in _mistakes(override_table)]
    if problems:
        raise as_error(problems)
    table = _merged(_anchored(table, path.resolve().parent), _anchored(override_table, Path.cwd()))
    if problems := [problem.located(origin) for problem in _missing(table)]:
        raise as_error(problems)
    written = msgspec.convert(table, Config)
    config = _settled(written)
    overridden = set(_leaves(override_table))
    if problems := [problem.located(OVERRIDE if problem.key in overridden else origin) for problem in launch_beside_urls(written)]:
        raise as_error(problems)
    if problems := [problem.located(OVERRIDE if problem.key in overridden else origin) for problem in contradictions(config)]:
        raise as_error(problems)
    return config


def synchronous(config: Config) -> Config:
    """Return the config with generation and training in turn: max_staleness = steps_ahead = 0, whatever else it says of the bound.

    Each version is served then: the next batch waits for it.
    """
    rollout = msgspec.structs.replace(config.rollout, max_staleness=0, steps_ahead=0.0, enforce="admission")
    trainer = msgspec.structs.replace(config.trainer, publish_every=1)
    debug = msgspec.structs.replace(config.debug, publish_lag=0)
    return msgspec.structs.replace(config, rollout=rollout, trainer=trainer, debug=debug)


def _settled(config: Config) -> Config:
    """Return the config with what keys imply written out: engines named by `urls` or `urls_file` are not launched."""
    if not config.engine.urls and not config.engine.urls_file:
        return config
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, launch="none"))


def _parse(path: Path) -> Table:
    try:
        text = read_bounded(path, MAX_CONFIG_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 (byte {error.start}): save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except StorageError as error:
        raise ConfigError(f"{path}: cannot be read as a config: {error}") from None
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: it is nested too deep") from None
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        lines = text.splitlines()
        number = int(found[1]) if found else len(lines)
        line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        reason = re.sub(r"\s*\(at [^)]*\)", "", str(error))
        raise ConfigError(f"{path}: line {number} is not valid TOML: {reason}", detail=f"    {line}" if line else "") from None


def _parse_overrides(overrides: Sequence[str]) -> Table:
    table: Table = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        path = name.strip()
        if not equals or not path:
            raise ConfigError(f"{OVERRIDE}: {override!r} is not key=value: write it like {OVERRIDE} rollout.max_staleness=4")
        *sections, last = path.split(".")
        place = table
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{OVERRIDE}: {path} lies inside a key that another {OVERRIDE} gives a value: remove one of the two")
        value = _parse_value(text.strip(), KEYS.get(path))
        place[last] = _merged(place[last], value) if isinstance(value, dict) and isinstance(place.get(last), dict) else value
    return table


def _parse_value(text: str, key: Key | None) -> Any:
    """Return a TOML value; where the key takes text, quotes may be left out (a shell eats them)."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    value = parsed["value"] if len(parsed) == 1 else text
    return text if key is not None and key.is_text and not isinstance(value, str) else value


def _mistakes(table: Mapping[str, Any], section: str = "") -> Iterator[Problem]:
    """Yield what is wrong with single keys of a (possibly partial) table: names, types, ranges, choices."""
    known = children(section)
    for name, value in table.items():
        path = known.get(name)
        if path is None:
            yield unknown(section, name)
        elif path in SECTIONS:
            if isinstance(value, dict):
                yield from _mistakes(value, path)
            else:
                yield Problem(path, f"{path} is {shown(value)}: it must be a table: write its keys under [{path}]")
        elif (problem := _mistake(KEYS[path], value)) is not None:
            yield problem


def _mistake(key: Key, value: Any) -> Problem | None:
    try:
        converted = msgspec.convert(value, key.declared)
    except msgspec.ValidationError:
        return Problem(key.path, f"{key.path} is {shown(value)}: it must be {_demand(key, value)}")
    for number in converted if isinstance(converted, tuple) else (converted,):
        if isinstance(number, float) and not math.isfinite(number):
            return Problem(key.path, f"{key.path} is {shown(value)}: it must be a finite number")
        if isinstance(number, int) and abs(number) >= 2**63:
            return Problem(key.path, f"{key.path} is {shown(value)}: it must fit into 64 bits")
    return None


def _demand(key: Key, value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key.plain in {int, float} and key.range:
        right_type = is_number and not (key.plain is int and isinstance(value, float))
        return f"{key.range} ({key.meaning_of_limit}){key.or_words}" if right_type else f"{key.kind}, {key.range}"
    if value == "" and key.plain is str:
        return f"given ({key.description.removesuffix('.')})"
    return key.kind


def _missing(table: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the required keys that a table lacks, among sections that are there or must be."""
    present = {field.encode_name for field in msgspec.structs.fields(Config) if field.required}
    present |= {path for path in SECTIONS if _found(table, path) is not None}
    for key in KEYS.values():
        if key.required and key.section in present and _found(table, key.path) is None:
            meaning = key.description.removesuffix(".")
            yield Problem(key.path, f"{key.path} is missing ({meaning}): add under [{key.section}]: {key.name} = {toml_value(key.example)}")


def _found(table: Mapping[str, Any], path: str) -> Any:
    found: Any = table
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _merged(base: Table, over: Table) -> Table:
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _leaves(table: Mapping[str, Any], section: str = "") -> Iterator[str]:
    for name, value in table.items():
        path = f"{section}.{name}" if section else name
        yield from _leaves(value, path) if isinstance(value, dict) else (path,)


def _anchored(table: Table, base: Path) -> Table:
    """Return the table with the paths of models, prompts and engines made absolute from `base`."""

    def anchor(text: str) -> str:
        return text if not text or ENTRY.match(text) else str(base / Path(text).expanduser())

    def anchor_program(text: str) -> str:
        return anchor(text) if "/" in text else text  # a bare name is looked for in PATH

    anchored = dict(table)
    for section, name in (("model", "path"), ("prompts", "source"), ("eval", "prompts")):
        if name in anchored.get(section, {}):
            anchored[section] = {**anchored[section], name: anchor(anchored[section][name])}
    engine = anchored.get("engine", {})
    for name, anchored_by in (("urls_file", anchor), ("python", anchor_program)):
        if name in engine:
            anchored["engine"] = engine = {**engine, name: anchored_by(engine[name])}
    return anchored
