"""Tables that say of which kind they are, like `{kind = "lognormal", mean = 30, sigma = 1}`: what is wrong with one, by kind and field.

Which kinds there are, and their fields, is read off the structs that a key's union names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

import msgspec

from headway.config.keys import Key, key_of
from headway.config.nearest import closest
from headway.config.problems import Problem
from headway.config.toml import shown, toml_value

EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "fixed": {"value": 30},
    "uniform": {"low": 10, "high": 50},
    "lognormal": {"mean": 30, "sigma": 1},
    "pareto": {"mean": 30, "shape": 2},
    "empirical": {"values": [21.5, 30.1, 28.9]},
    "mixture": {"parts": [[0.9, {"kind": "fixed", "value": 25}], [0.1, {"kind": "fixed", "value": 75}]]},
}
"""The fields of each kind, as messages and the reference page write them."""

Tables = Mapping[str, type[msgspec.Struct]]
_DEEPEST = 8  # tables in tables


def example_of(kind: str) -> str:
    """Return a table of this kind, as TOML."""
    return toml_value({"kind": kind, **EXAMPLES[kind]})


def demand_of(key: Key, value: Any) -> str:
    """Return what the value of a key must be, given what it is, as it reads after "it must be"."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key.plain in {int, float} and key.range:
        right_type = is_number and not (key.plain is int and isinstance(value, float))
        if right_type:
            meaning = f" ({key.meaning_of_limit})" if key.description else ""
            return f"{key.range}{meaning}" + ("" if key.tables else key.or_words)
        return key.kind if key.tables else f"{key.kind}, {key.range}"
    if value == "" and key.plain is str:
        return f"given ({key.description.removesuffix('.')})"
    return key.kind


def mistakes_of_a_kind(tables: Tables, value: Mapping[str, Any], place: str) -> Iterator[Problem]:
    """Yield what is wrong with a table that stands at `place`; none: it is one of `tables`."""
    kind = value.get("kind")
    if place.count("[") > _DEEPEST:
        yield Problem(place, f"{place}: it is nested too deep")
        return
    if kind is None:
        yield from _without_kind(tables, value, place)
        return
    if not isinstance(kind, str) or kind not in tables:
        meant = closest(str(kind).lower()[:80], tables, at_least=0.6)
        advice = f"did you mean {' or '.join(toml_value(name) for name in meant)}?" if meant else f"there are {_listed(tables)}"
        yield Problem(place, f"{place}.kind is {shown(kind)}: no such kind; {advice}")
        return
    problems = list(_fields(tables, kind, value, place))
    yield from problems
    if not problems:
        yield from _together(tables[kind], value, place)


def _without_kind(tables: Tables, value: Mapping[str, Any], place: str) -> Iterator[Problem]:
    if meant := [name for name in value if closest(name[:80], ["kind"], at_least=0.7)]:
        yield Problem(place, f"{place}.{_name(meant[0])}: no such key; did you mean kind?")
    else:
        yield Problem(place, f"{place} is {shown(value)}: its kind is missing; there are {_listed(tables)}")


def _fields(tables: Tables, kind: str, value: Mapping[str, Any], place: str) -> Iterator[Problem]:
    known = {found.name: key_of(place, found) for found in msgspec.structs.fields(tables[kind])}
    for name, given in value.items():
        if name == "kind":
            continue
        if name not in known:
            meant = closest(name.lower()[:80], known, at_least=0.5)
            advice = f"did you mean {' or '.join(meant)}?" if meant else f"it is written like {example_of(kind)}"
            yield Problem(place, f"{place}.{_name(name)}: no such key of kind {toml_value(kind)}; {advice}")
        elif get_origin(known[name].plain) is tuple:
            yield from _list(tables, kind, known[name], given)
        elif wrong := _wrong(known[name], given):
            yield _told(known[name].path, kind, given, wrong)
    for name in known:
        if name not in value:
            yield Problem(place, f"{place}.{name} is missing: a {kind} is written like {example_of(kind)}")


def _wrong(key: Key, value: Any) -> str:
    """Return what a number must be that it is not; empty: it is right."""
    try:
        number = msgspec.convert(value, key.declared)
    except msgspec.ValidationError:
        return demand_of(key, value)
    return "" if math.isfinite(number) else "a finite number"


def _list(tables: Tables, kind: str, key: Key, value: Any) -> Iterator[Problem]:
    if not isinstance(value, list) or not value:
        what = f"a list like {toml_value(EXAMPLES[kind][key.name])}, with at least one entry"
        yield _told(key.path, kind, value, what)
        return
    member = get_args(key.plain)[0]
    of_parts = get_origin(member) is tuple
    for number, each in enumerate(value):
        place = f"{key.path}[{number}]"
        if not of_parts:
            if wrong := _wrong(_member(key, member), each):
                yield _told(place, kind, each, wrong)
        elif not isinstance(each, list) or len(each) != 2 or not isinstance(each[1], dict):
            yield _told(place, kind, each, f"a weight and a table, like {toml_value(EXAMPLES[kind][key.name][0])}")
        else:
            if wrong := _wrong(_member(key, get_args(member)[0]), each[0]):
                yield _told(f"{place}, its weight,", kind, each[0], wrong)
            yield from mistakes_of_a_kind(tables, each[1], place)


def _member(key: Key, declared: Any) -> Key:
    (found,) = msgspec.structs.fields(msgspec.defstruct("Member", [(key.name, declared)]))
    return key_of("", found)


def _together(table: type[msgspec.Struct], value: Mapping[str, Any], place: str) -> Iterator[Problem]:
    """Yield what the fields of a table, each right by itself, say against each other."""
    try:
        msgspec.convert(value, table)
    except msgspec.ValidationError as error:
        yield Problem(place, f"{place}: {str(error).partition(' - at `')[0]}")


def _told(place: str, kind: str, value: Any, demand: str) -> Problem:
    return Problem(place, f"{place} is {shown(value)}: of kind {toml_value(kind)} it must be {demand}")


def _listed(tables: Tables) -> str:
    return ", ".join(toml_value(name) for name in tables)


def _name(name: str) -> str:
    return name if name.isidentifier() and len(name) <= 80 else shown(name)
