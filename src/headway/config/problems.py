"""A problem of a config: a line for its reader; and how several of them become one error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.config.toml import shown
from headway.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with `key` (dotted; empty: with the file), in one line that starts with the key; `detail` goes below the line."""

    key: str
    message: str
    detail: str = ""

    def located(self, origin: str) -> Problem:
        """Return the problem with the place where the key was set before its message."""
        return Problem(self.key, f"{origin}: {self.message}", self.detail)


def as_error(problems: Sequence[Problem]) -> ConfigError:
    """Return one error for all problems (at least one): the first is its line, the others stand below it."""
    first, *others = problems
    below = [first.detail.rstrip(), *(f"{other.message}\n{other.detail}".rstrip() for other in others)]
    return ConfigError(first.message, detail="\n".join(part for part in below if part))


def is_wrong(key: str, value: object, problem: str) -> Problem:
    """Return the problem that a key has with its value."""
    return Problem(key, f"{key} is {shown(value)}: {problem}")
