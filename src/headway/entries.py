"""Imports what a user names as `module:name`: environments, scorers, prompt functions, filters.

Modules beside the config file are found, as if Python had been started there. What cannot be imported is a `ConfigError` whose message is
one line and whose detail is the user's own traceback.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

from headway.errors import ConfigError


def load_entry(entry: str, base: Path, *, key: str) -> Any:
    """Return the object that `entry` ("module:name", dots allowed on both sides) names; `key` is the config key it came from.

    `base` is put first on `sys.path`. Raises `ConfigError` where the module does not import or has no such name.
    """
    module_name, _, attribute = entry.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f'{key} is "{entry}": it must have the form "module:name"')
    directory = str(base.resolve())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        detail = "".join(traceback.format_exception(error))
        raise ConfigError(f'{key}: module "{module_name}" does not import: {type(error).__name__}: {error}', detail=detail) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ConfigError(f'{key}: module "{module_name}" has no "{attribute}": define it, or correct the key')
        found = getattr(found, name)
    return found
