"""Whose weights wrote a token: version labels, the version that a fleet serves, and which versions belong to a run's line.

STALENESS.md, terms: the served version is the *minimum* over serving engines; line 4 of the invariant: stamps above it "belong to weights
that no longer exist: lineage rejects them". On the wire a version is `"<lineage>-<n>"`; any other label means *not ours*. A lineage ends
where training goes back to an older version; the new one inherits its parent's versions up to that fork.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

_LABEL = re.compile(r"(?P<lineage>[^-\s]+)-(?P<version>0|[1-9][0-9]{0,17})", re.ASCII)


class Label(msgspec.Struct, frozen=True):
    """A version of a lineage."""

    lineage: str
    version: int

    def __str__(self) -> str:
        """Return it as it is written on the wire."""
        return f"{self.lineage}-{self.version}"


def parse_label(label: str) -> Label | None:
    """Return what a label names; None: not one of ours ("default", a path, a number that is not written the one way)."""
    match = _LABEL.fullmatch(label)
    return Label(match["lineage"], int(match["version"])) if match else None


def served_version(versions: Iterable[int]) -> int:
    """Return the version that may be counted on: the oldest that any serving engine serves; -1: none serves."""
    return min(versions, default=-1)


class Line(msgspec.Struct, frozen=True):
    """A lineage with what it inherits: `forks` holds the newest version that counts of each ancestor."""

    lineage: str
    forks: Mapping[str, int] = {}


def line_of(lineage: str, parents: Mapping[str, str | None]) -> Line:
    """Return the line that a lineage continues. `parents`: the label that each lineage went back to; None or absent: a first one.

    An ancestor counts up to the oldest fork on the way to it.

    Raises:
        ValueError: a parent is no label, or a lineage is its own ancestor.
    """
    forks: dict[str, int] = {}
    label, until = parents.get(lineage), None
    while label is not None:
        fork = parse_label(label)
        if fork is None:
            raise ValueError(f"the parent of a lineage must be <lineage>-<version>, not {label!r}")
        if fork.lineage == lineage or fork.lineage in forks:
            raise ValueError(f"lineage {fork.lineage} is its own ancestor")
        until = fork.version if until is None else min(until, fork.version)
        forks[fork.lineage] = until
        label = parents.get(fork.lineage)
    return Line(lineage, forks)


def belongs(lineage: str, version: int, to: Line) -> bool:
    """Whether a version of some lineage is one that `to` has: its own, or an ancestor's up to the fork."""
    return lineage == to.lineage or version <= to.forks.get(lineage, -1)
