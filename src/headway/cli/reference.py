"""The reference page of all config keys, written from the structs that define them."""

from __future__ import annotations

from collections.abc import Iterator

from headway.config.keys import KEYS, SECTIONS, Key
from headway.config.toml import toml_value

_HEAD = """\
# Config reference

Every key of a run's TOML file. A key that is not listed here is an error. `headway run CONFIG --set section.key=value` gives any of them
another value for one run. This page is written by `make reference` from the definitions in `src/headway/settings/`.
"""


def reference() -> str:
    """Return the page, in Markdown."""
    return "\n".join([_HEAD, *(_section(path) for path in SECTIONS)])


def _section(path: str) -> str:
    keys = [key for key in KEYS.values() if key.section == path]
    rows = ["| key | value | default | meaning |", "|---|---|---|---|", *map(_row, keys)]
    return "\n".join([f"## [{path}]", "", SECTIONS[path].__doc__ or "", "", *rows, ""])


def _row(key: Key) -> str:
    cells = [f"`{key.name}`", "; ".join(_value(key)), _default(key), key.description]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(key: Key) -> Iterator[str]:
    if key.choices:
        yield ", ".join(f"`{toml_value(choice)}`" for choice in key.choices)
    else:
        plain = {bool: "true or false", int: "whole number", float: "number", str: "text"}.get(key.plain, key.kind.partition(" like ")[0])
        yield plain + key.or_words.replace('"', "`")
    if key.range:
        yield key.range
    if key.example is not None:
        yield f"like `{toml_value(key.example)}`"


def _default(key: Key) -> str:
    if key.required:
        return "required"
    return "unset" if key.default is None else f"`{toml_value(key.default)}`"
