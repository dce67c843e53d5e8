"""Every key of a file, read off the structs that it is read into: its type, range, choices, default and meaning.

The structs are the one definition; error messages and the reference pages both speak from what is found here. A `Schema` is all that
there is below one struct: `CONFIG` of `headway.settings`, others of what reads files of its own (`headway.sim.scenario`).
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from headway.config.toml import toml_value
from headway.settings import Config, Section

A_TABLE = '{kind = "lognormal", mean = 30, sigma = 1}'


@dataclass(frozen=True, slots=True)
class Key:
    """One key. `declared` is the annotation (`msgspec.convert` takes it); `plain` the type without constraints and without None.

    `words`: texts that may stand in place of a number; `tables`: the tables that may, by their `kind` (`headway.config.kinds`).
    `member`: of a list of numbers, the rules that each of them keeps.
    """

    section: str
    name: str
    declared: Any
    plain: Any
    rules: tuple[Meta, ...]
    required: bool
    default: Any
    words: tuple[str, ...] = ()
    tables: Mapping[str, type[msgspec.Struct]] = field(default_factory=dict)
    member: tuple[Meta, ...] = ()

    @property
    def path(self) -> str:
        """The dotted name: `rollout.max_staleness`."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def description(self) -> str:
        """What the key means."""
        return next((rule.description for rule in self.rules if rule.description), "")

    @property
    def example(self) -> Any:
        """A value that shows what is meant; None where the type says enough."""
        return next((rule.examples[0] for rule in self.rules if rule.examples), None)

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a closed choice, in the order of their definition; empty for any other type."""
        return get_args(self.plain) if get_origin(self.plain) is Literal else ()

    @property
    def is_text(self) -> bool:
        """Whether the value is text, free or of a closed choice."""
        return self.plain is str or bool(self.choices)

    def limit(self, kind: Literal["ge", "gt", "le", "lt"]) -> float | None:
        """Return a limit of the range: at least, above, at most, below."""
        return _limit(self.rules, kind)

    @property
    def kind(self) -> str:
        """What a value must be, as it reads after "it must be"."""
        if self.choices:
            return "one of " + ", ".join(toml_value(choice) for choice in self.choices)
        if get_origin(self.plain) is tuple:
            members = get_args(self.plain)
            noun = {str: "texts", float: "numbers", int: "whole numbers"}[_unwrap(members[0])[0]]
            count = "" if members[-1] is ... else f"{len(members)} "
            each = f", each {limits}" if (limits := _in_words(self.member)) else ""
            return f"a list of {count}{noun}{each}{self._for_example}"
        if any(rule.pattern for rule in self.rules):
            return f"text{self._for_example}"
        return {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}[self.plain] + self.or_words

    @property
    def or_words(self) -> str:
        """The texts and tables that may stand in place of a number, as they read after it; empty: none."""
        return "".join(f", or {toml_value(word)}" for word in self.words) + (f" or a table like {A_TABLE}" if self.tables else "")

    @property
    def _for_example(self) -> str:
        return "" if self.example is None else f" like {toml_value(self.example)}"

    @property
    def range(self) -> str:
        """The range of a number, in words: `0 or more`, `above 0 and at most 1`; empty: none."""
        return _in_words(self.rules)

    @property
    def meaning_of_limit(self) -> str:
        """The clause of the description that tells what the lowest value means (`0 trains on-policy`), otherwise all of it."""
        lowest = self.limit("ge")
        clauses = self.description.removesuffix(".").split("; ")
        about = next((clause for clause in clauses if lowest is not None and clause.startswith((f"{lowest:g} ", f"{lowest:g}:"))), "")
        return about or self.description.removesuffix(".")


def _limit(rules: tuple[Meta, ...], kind: str) -> float | None:
    return next((getattr(rule, kind) for rule in rules if getattr(rule, kind) is not None), None)


def _in_words(rules: tuple[Meta, ...]) -> str:
    """Return a range in words; empty: there is none."""
    at_least, above, at_most, below = (_limit(rules, kind) for kind in ("ge", "gt", "le", "lt"))
    low = f"{at_least:g} or more" if at_least is not None else f"above {above:g}" if above is not None else ""
    high = f"at most {at_most:g}" if at_most is not None else f"below {below:g}" if below is not None else ""
    return " and ".join(part for part in (low, high) if part)


class Schema:
    """All sections and keys below a root struct, by their dotted paths, in the order of their definition.

    `lists`: those of the sections that are lists of tables, like [[faults]].
    """

    def __init__(self, root: type[Section]) -> None:
        self.root = root
        self.lists: set[str] = set()
        self._walked = dict(self._walk(root, ""))
        self.sections: dict[str, type[Section]] = {path: found for path, found in self._walked.items() if not isinstance(found, Key)}
        self.keys: dict[str, Key] = {path: found for path, found in self._walked.items() if isinstance(found, Key)}

    def children(self, section: str) -> dict[str, str]:
        """Return the names in a section (empty path: the sections themselves), each with its dotted path."""
        prefix = f"{section}." if section else ""
        return {
            path.removeprefix(prefix): path for path in self._walked if path.startswith(prefix) and "." not in path.removeprefix(prefix)
        }

    def heading(self, section: str) -> str:
        """Return what stands above the keys of a section: `[trainer]`, `[[faults]]`."""
        return f"[[{section}]]" if section in self.lists else f"[{section}]"

    def _walk(self, section: type[Section], path: str) -> Iterator[tuple[str, type[Section] | Key]]:
        for found in msgspec.structs.fields(section):
            name = f"{path}.{found.name}" if path else found.name
            below = _section_of(found.type)
            if below is None:
                yield name, key_of(path, found)
                continue
            if get_origin(_unwrap(found.type)[0]) is tuple:
                self.lists.add(name)
            yield name, below
            yield from self._walk(below, name)


def key_of(section: str, found: msgspec.structs.FieldInfo) -> Key:
    """Return the key that a field of a struct is."""
    plain, rules = _unwrap(found.type)
    member = _unwrap(get_args(plain)[0])[1] if get_origin(plain) is tuple else ()
    return Key(
        section, found.name, found.type, plain, rules, found.required, found.default, _words(found.type), _tables(found.type), member
    )


def _section_of(declared: Any) -> type[Section] | None:
    """Return the section that a field is, or is a list of."""
    plain, _ = _unwrap(declared)
    if get_origin(plain) is tuple:
        plain = get_args(plain)[0]
    return plain if isinstance(plain, type) and issubclass(plain, Section) else None


def _unwrap(declared: Any) -> tuple[Any, tuple[Meta, ...]]:
    """Return the type below `Annotated`, `| None` and tables of a kind, and every rule met on the way."""
    if get_origin(declared) is typing.Annotated:
        inner, *rules = get_args(declared)
        plain, more = _unwrap(inner)
        return plain, (*rules, *more)
    if get_origin(declared) in {types.UnionType, typing.Union}:
        others = [member for member in get_args(declared) if member is not type(None) and get_origin(member) is not Literal]
        (inner,) = [member for member in others if not _is_table(member)] or [float]
        return _unwrap(inner)
    return declared, ()


def _words(declared: Any) -> tuple[str, ...]:
    """Return the texts that a union allows beside its type."""
    return tuple(word for member in _members(declared) if get_origin(member) is Literal for word in get_args(member))


def _tables(declared: Any) -> dict[str, type[msgspec.Struct]]:
    """Return the tables that a union allows, by the name of their kind."""
    return {str(member.__struct_config__.tag): member for member in _members(declared) if _is_table(member)}


def _members(declared: Any) -> tuple[Any, ...]:
    """Return the members of a union; of any other type none."""
    if get_origin(declared) is typing.Annotated:
        return _members(get_args(declared)[0])
    return get_args(declared) if get_origin(declared) in {types.UnionType, typing.Union} else ()


def _is_table(member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, msgspec.Struct) and member.__struct_config__.tag is not None


CONFIG = Schema(Config)
SECTIONS, KEYS, children = CONFIG.sections, CONFIG.keys, CONFIG.children
