"""What a check of the conformance suite comes to, and how it says so."""

from __future__ import annotations

from typing import Literal

import msgspec


class Verdict(msgspec.Struct, frozen=True):
    """One check: its name, what it proves, and what came of it. `told`: what was seen; of a skipped one, why it was."""

    name: str
    proves: str
    outcome: Literal["passed", "failed", "skipped"]
    told: str

    def __str__(self) -> str:
        """Return the line for people."""
        return f"{self.outcome:8}{self.name:20}{self.told or self.proves}"


class Failed(Exception):
    """The server does something else; the text says what was seen."""


class Skipped(Exception):
    """It cannot be told; the text says why."""


class Missed(Skipped):
    """It could not be told this time: what was to be met in flight was over. The check is worth another try."""


def expect(condition: bool, seen: str) -> None:  # noqa: FBT001 -- reads as an assertion
    """Raise `Failed` with what was seen unless `condition` holds."""
    if not condition:
        raise Failed(seen)
