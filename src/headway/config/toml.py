"""Config values as TOML text; a whole config as the file that the run directory keeps."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from headway.secrecy import without_login
from headway.settings import Config

_LONGEST_SHOWN = 200  # characters of a value in a message


def toml_value(value: Any) -> str:
    """Return a boolean, number, text, list, table or date as one line of TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON escapes what TOML wants escaped, but for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml_value(item)}" for name, item in value.items()) + "}"
    return str(value)


def shown(value: Any) -> str:
    """Return a value as TOML for a message of one line: at most 200 characters of it, as a value can be as long as its file."""
    text = toml_value(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def resolved(config: Config) -> str:
    """Return the whole config, defaults included, as TOML that `load_config` reads back to an equal one, but for logins in URLs."""
    tables: list[str] = ["# The resolved config of this run: every key that was in force, defaults included.\n"]

    def add(section: msgspec.Struct, path: str) -> None:
        items = {name: value for name in section.__struct_fields__ if (value := getattr(section, name)) is not None}
        lines = [f"{name} = {toml_value(_public(value))}" for name, value in items.items() if not isinstance(value, msgspec.Struct)]
        if path:
            tables.append("\n".join([f"[{path}]", *lines, ""]))
        for name, value in items.items():
            if isinstance(value, msgspec.Struct):
                add(value, f"{path}.{name}" if path else name)

    add(config, "")
    return "\n".join(tables)


def _public(value: Any) -> Any:
    """Return a value without a login in it: a config that is kept is read by many."""
    if isinstance(value, tuple):
        return tuple(map(_public, value))
    return without_login(value) if isinstance(value, str) else value
