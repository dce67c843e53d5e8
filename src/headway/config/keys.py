"""Every key of a config, read off the structs of `headway.settings`: its type, range, choices, default and meaning.

The structs are the one definition; error messages and the reference page both speak from what is found here.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from headway.config.toml import toml_value
from headway.settings import Config, Section


@dataclass(frozen=True, slots=True)
class Key:
    """One key. `declared` is the annotation (`msgspec.convert` takes it); `plain` the type without constraints and without None.

    `words`: texts that may stand in place of a number.
    """

    section: str
    name: str
    declared: Any
    plain: Any
    rules: tuple[Meta, ...]
    required: bool
    default: Any
    words: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The dotted name: `rollout.max_staleness`."""
        return f"{self.section}.{self.name}"

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
        return next((getattr(rule, kind) for rule in self.rules if getattr(rule, kind) is not None), None)

    @property
    def kind(self) -> str:
        """What a value must be, as it reads after "it must be"."""
        if self.choices:
            return "one of " + ", ".join(toml_value(choice) for choice in self.choices)
        if get_origin(self.plain) is tuple:
            members = get_args(self.plain)
            noun = {str: "texts", float: "numbers"}[members[0]]
            count = "" if members[-1] is ... else f"{len(members)} "
            return f"a list of {count}{noun}{self._for_example}"
        if any(rule.pattern for rule in self.rules):
            return f"text{self._for_example}"
        return {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}[self.plain] + self.or_words

    @property
    def or_words(self) -> str:
        """The texts that may stand in place of a number, as they read after it; empty: none."""
        return "".join(f", or {toml_value(word)}" for word in self.words)

    @property
    def _for_example(self) -> str:
        return "" if self.example is None else f" like {toml_value(self.example)}"

    @property
    def range(self) -> str:
        """The range of a number, in words: `0 or more`, `above 0 and at most 1`; empty: none."""
        at_least, above, at_most, below = (self.limit(kind) for kind in ("ge", "gt", "le", "lt"))
        low = f"{at_least:g} or more" if at_least is not None else f"above {above:g}" if above is not None else ""
        high = f"at most {at_most:g}" if at_most is not None else f"below {below:g}" if below is not None else ""
        return " and ".join(part for part in (low, high) if part)

    @property
    def meaning_of_limit(self) -> str:
        """The clause of the description that tells what the lowest value means (`0 trains on-policy`), otherwise all of it."""
        lowest = self.limit("ge")
        clauses = self.description.removesuffix(".").split("; ")
        about = next((clause for clause in clauses if lowest is not None and clause.startswith((f"{lowest:g} ", f"{lowest:g}:"))), "")
        return about or self.description.removesuffix(".")


def _walk(section: type[Section], path: str) -> Iterator[tuple[str, type[Section] | Key]]:
    for field in msgspec.structs.fields(section):
        plain, rules = _unwrap(field.type)
        name = f"{path}.{field.name}" if path else field.name
        if isinstance(plain, type) and issubclass(plain, Section):
            yield name, plain
            yield from _walk(plain, name)
        else:
            yield name, Key(path, field.name, field.type, plain, rules, field.required, field.default, _words(field.type))


def _unwrap(declared: Any) -> tuple[Any, tuple[Meta, ...]]:
    """Return the type below `Annotated` and `| None`, and every rule met on the way."""
    if get_origin(declared) is typing.Annotated:
        inner, *rules = get_args(declared)
        plain, more = _unwrap(inner)
        return plain, (*rules, *more)
    if get_origin(declared) in {types.UnionType, typing.Union}:
        (inner,) = (member for member in get_args(declared) if member is not type(None) and get_origin(member) is not Literal)
        return _unwrap(inner)
    return declared, ()


def _words(declared: Any) -> tuple[str, ...]:
    """Return the texts that a union allows beside its type."""
    if get_origin(declared) is typing.Annotated:
        return _words(get_args(declared)[0])
    if get_origin(declared) in {types.UnionType, typing.Union}:
        return tuple(word for member in get_args(declared) if get_origin(member) is Literal for word in get_args(member))
    return ()


_WALKED = dict(_walk(Config, ""))
SECTIONS: dict[str, type[Section]] = {path: found for path, found in _WALKED.items() if not isinstance(found, Key)}
KEYS: dict[str, Key] = {path: found for path, found in _WALKED.items() if isinstance(found, Key)}


def children(section: str) -> dict[str, str]:
    """Return the names in a section (empty path: the sections themselves), each with its dotted path."""
    prefix = f"{section}." if section else ""
    return {path.removeprefix(prefix): path for path in _WALKED if path.startswith(prefix) and "." not in path.removeprefix(prefix)}
