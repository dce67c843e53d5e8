"""What makes a row a prompt: an id that no other row of its epoch has, and fields that a worker can be sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headway.errors import ConfigError, HeadwayError
from headway.settings import PromptsSection

_encode = msgspec.msgpack.Encoder().encode


def fields_of(row: Any, number: int, settings: PromptsSection, error: type[HeadwayError] = ConfigError) -> dict[str, Any]:
    """Return the fields of a prompt. Raises `error` for a value that no worker could be sent."""
    try:
        fields = dict(row)
        _encode(fields)
    except (TypeError, ValueError, OverflowError) as refused:
        raise error(
            f"prompts: row {number} of {settings.source} cannot be sent to a worker: {refused}: use text, numbers, lists and dicts"
        ) from refused
    return fields


class Ids:
    """Gives each row of one epoch its id, and refuses an id that was given before."""

    def __init__(self, settings: PromptsSection) -> None:
        self._settings = settings
        self._given: dict[int, int] = {}  # hash of an id to its row: an endless stream costs about 100 bytes a row

    def of(self, row: Any, number: int) -> str:
        """Return the id of row `number`. Raises `ConfigError`."""
        source, field = self._settings.source, self._settings.id_field
        if not isinstance(row, Mapping):
            raise ConfigError(f"prompts: row {number} of {source} is {type(row).__name__}: each row must be a dict")
        value = row.get(field)
        if value is None:
            value = number
        if not isinstance(value, (str, int)) or isinstance(value, bool):
            raise ConfigError(f'prompts: row {number} of {source} has {value!r} as "{field}": an id is a text or an integer')
        identity = str(value)
        earlier = self._given.setdefault(hash(identity), number)
        if earlier != number:
            raise ConfigError(f'prompts: rows {earlier} and {number} of {source} have the same id "{identity}": ids must be unique')
        return identity
