"""TOML files and `--set` values against a `Schema`: every mistake found in one reading, each told in one line.

Knows sections and keys, and nothing of what they mean together: `headway.config.load` reads runs with it, `headway.planning` scenarios.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headway.config.keys import Key, Schema
from headway.config.kinds import demand_of, mistakes_of_a_kind
from headway.config.nearest import unknown
from headway.config.problems import Problem, as_error
from headway.config.toml import shown, toml_value
from headway.errors import ConfigError, StorageError
from headway.formats.bounded import read_bounded

OVERRIDE = "--set"
_VALUE = "value = "  # what a value by itself is read behind
MAX_CONFIG_BYTES = 1024**2

Table = dict[str, Any]


class Layer(NamedTuple):
    """A table of values, and where they stand."""

    origin: str
    table: Table


def check(schema: Schema, layers: Sequence[Layer]) -> None:
    """Raise ConfigError for every value of the layers that is wrong by itself."""
    problems = [problem.located(layer.origin) for layer in layers for problem in _mistakes(schema, layer.table)]
    if problems:
        raise as_error(problems)


def check_complete(schema: Schema, whole: Layer) -> None:
    """Raise ConfigError for every required key that a table lacks, once all layers are in it."""
    if problems := [problem.located(whole.origin) for problem in _missing(schema, whole.table)]:
        raise as_error(problems)


def read_text(path: Path, what: str, most_bytes: int) -> str:
    """Return the text of a file that somebody names; raises ConfigError in one line. `what` it is to be read as, for the line."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: {'a directory' if path.is_dir() else 'no regular file'}, and cannot be read as {what}: name a file")
    try:
        return read_bounded(path, most_bytes).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 (byte {error.start}): save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except StorageError as error:
        raise ConfigError(f"{path}: cannot be read as {what}: {error}") from None


def parse(path: Path, what: str = "config", most_bytes: int = MAX_CONFIG_BYTES) -> Table:
    """Return a TOML file's table; raises ConfigError, with the line where it is not valid."""
    text = read_text(path, f"a {what}", most_bytes)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: it is nested too deep") from None
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        lines = text.splitlines()
        number = int(found[1]) if found else len(lines)
        line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        raise ConfigError(f"{path}: line {number} is not valid TOML: {_reason(error)}", detail=f"    {line}" if line else "") from None


def parse_overrides(schema: Schema, overrides: Sequence[str]) -> Table:
    """Return the table that `key=value` texts make together; raises ConfigError."""
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
        value = parse_value(text.strip(), schema.keys.get(path), f"{OVERRIDE}: {path}")
        place[last] = _deep(place[last], value) if isinstance(value, dict) and isinstance(place.get(last), dict) else value
    return table


def parse_value(text: str, key: Key | None, named: str) -> Any:
    """Return a TOML value; where the key takes text, quotes may be left out (a shell eats them).

    Raises ConfigError for a table or a list that is none, where the key takes no text; `named`: whose value it is, in messages.
    """
    is_text = key is not None and key.is_text
    try:
        parsed = tomllib.loads(_VALUE + text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        if text.startswith(("{", "[")) and not is_text:
            raise ConfigError(f"{named}: {shown(text)} is not valid TOML: {_reason(error)}{_where(error, text)}") from None
        return text
    value = parsed["value"] if len(parsed) == 1 else text
    return text if is_text and not isinstance(value, str) else value


def _where(error: Exception, text: str) -> str:
    """Return from where on a value of one line is not TOML; "": that is not known."""
    found = re.search(r"\(at line 1, column (\d+)\)", str(error))
    rest = text[int(found[1]) - 1 - len(_VALUE) :] if found else ""
    return f" at {shown(rest)}" if rest else ""


def _reason(error: Exception) -> str:
    """Return what tomllib says against a text, without the place, in one line."""
    return re.sub(r"\s*\(at [^)]*\)", "", str(error)) if isinstance(error, tomllib.TOMLDecodeError) else "it is nested too deep"


def _deep(base: Table, over: Table) -> Table:
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        merged[name] = _deep(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def merged(schema: Schema, base: Table, over: Table, section: str = "") -> Table:
    """Return a table with another on top: sections are merged key by key, a value replaces a value.

    A table of a kind replaces what is below unless it leaves its kind out: then its fields do (`--set workload.tokens.sigma=2`).
    """
    result = dict(base)
    for name, value in over.items():
        path, old = f"{section}.{name}" if section else name, result.get(name)
        if not (isinstance(old, dict) and isinstance(value, dict)):
            result[name] = value
        elif path in schema.keys:
            result[name] = _whole(old, value)
        else:
            result[name] = merged(schema, old, value, path)
    return result


def completed(schema: Schema, base: Table, over: Table, section: str = "") -> Table:
    """Return `over`, in which tables of a kind that leave their kind out are filled in from `base`: `merged`, but of those keys alone."""
    result = dict(over)
    for name, value in over.items():
        path, old = f"{section}.{name}" if section else name, base.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            result[name] = _whole(old, value) if path in schema.keys else completed(schema, old, value, path)
    return result


def _whole(old: Table, value: Table) -> Table:
    return value if "kind" in value else {**old, **value}


def leaves(schema: Schema, table: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Yield the dotted paths of what a table gives values."""
    for name, value in table.items():
        path = f"{section}.{name}" if section else name
        yield from leaves(schema, value, path) if isinstance(value, dict) and path not in schema.keys else (path,)


def found_at(table: Mapping[str, Any], path: str) -> Any:
    """Return what a table holds at a dotted path; None: nothing."""
    found: Any = table
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _mistakes(schema: Schema, table: Mapping[str, Any], section: str = "", place: str = "") -> Iterator[Problem]:
    """Yield what is wrong with single keys of a (possibly partial) table. `place`: the section as messages name it, `faults[0]`."""
    known = schema.children(section)
    for name, value in table.items():
        path = known.get(name)
        if path is None:
            yield unknown(section, name, schema, place=place)
            continue
        here = f"{place}.{name}" if place else name
        if path in schema.lists:
            if isinstance(value, list) and all(isinstance(each, dict) for each in value):
                for number, each in enumerate(value):
                    yield from _mistakes(schema, each, path, f"{here}[{number}]")
            else:
                yield Problem(here, f"{here} is {shown(value)}: it must be a list of tables: write each under {schema.heading(path)}")
        elif path in schema.sections:
            if isinstance(value, dict):
                yield from _mistakes(schema, value, path, here)
            else:
                yield Problem(here, f"{here} is {shown(value)}: it must be a table: write its keys under {schema.heading(path)}")
        elif schema.keys[path].tables and isinstance(value, dict):
            yield from mistakes_of_a_kind(schema.keys[path].tables, value, here)
        elif (problem := _mistake(schema.keys[path], value, here)) is not None:
            yield problem


def _mistake(key: Key, value: Any, place: str) -> Problem | None:
    try:
        converted = msgspec.convert(value, key.declared)
    except msgspec.ValidationError:
        return Problem(place, f"{place} is {shown(value)}: it must be {demand_of(key, value)}")
    for number in converted if isinstance(converted, tuple) else (converted,):
        if isinstance(number, float) and not math.isfinite(number):
            return Problem(place, f"{place} is {shown(value)}: it must be a finite number")
        if isinstance(number, int) and abs(number) >= 2**63:
            return Problem(place, f"{place} is {shown(value)}: it must fit into 64 bits")
    return None


def _missing(schema: Schema, table: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the required keys that a table lacks, among sections that are there or must be."""
    present = {field.encode_name for field in msgspec.structs.fields(schema.root) if field.required}
    present |= {path for path in schema.sections if found_at(table, path) is not None}
    for key in schema.keys.values():
        if not key.required or key.section not in present:
            continue
        section = found_at(table, key.section) or {}
        listed = key.section in schema.lists
        for number, each in enumerate(section if listed else [section]):
            if each.get(key.name) is None:
                place = f"{key.section}[{number}].{key.name}" if listed else key.path
                meaning = key.description.removesuffix(".")
                add = f"add under {schema.heading(key.section)}: {key.name} = {toml_value(key.example)}"
                yield Problem(place, f"{place} is missing ({meaning}): {add}")
