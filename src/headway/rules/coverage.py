"""Head coverage as an alarm: a kind of rollout whose first tokens never train is never learned from, whatever the bound says.

Under a mask a rollout that is always late keeps its last tokens and loses its first: the early decision to go long is credited only when
some rollouts of its kind arrive young (STALENESS.md, "Masking has a price in learning"). So the share of rollouts whose first sampled
tokens contribute is watched for every *part* of a run: each environment, and each tenth of its rollouts by length. Below three quarters
of them over the last batches is worth a warning; none at all in so many batches in a row ends the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

WINDOW_BATCHES = 10
LOW = 0.75  # below it a mask costs more reward than noise, in the study that was made to set this (docs/concepts/study.md)
RECOVERED = 0.8  # what was low is so until here: a share that wavers about the mark is one episode
FEWEST_ROLLOUTS = 10  # in the window, before a share says anything


class Part(NamedTuple):
    """Rollouts of one environment: all of them, or one tenth by length (0: shortest, 9: longest)."""

    environment: str
    tenth: int | None = None


class Tally(NamedTuple):
    """How many rollouts there were (a tenth is counted as a tenth of its environment), and how many of them were covered."""

    covered: float
    rollouts: float

    @property
    def share(self) -> float:
        """The share that was covered, 0..1."""
        return self.covered / self.rollouts


def tallies(row: Mapping[str, Any]) -> dict[Part, Tally]:
    """Return the parts that occur in one batch, from its row of metrics."""
    found: dict[Part, Tally] = {}
    for environment, rollouts in row["rollouts_by_environment"].items():
        found[Part(environment)] = Tally(row["head_coverage_by_environment"][environment] * rollouts, rollouts)
        for tenth, share in enumerate(row["head_coverage_by_length"][environment]):
            if share is not None:
                found[Part(environment, tenth)] = Tally(share * rollouts / 10, rollouts / 10)
    return found


def summed(batches: Iterable[Mapping[Part, Tally]]) -> dict[Part, Tally]:
    """Return each part's tally over several batches."""
    total: dict[Part, Tally] = {}
    for batch in batches:
        for part, tally in batch.items():
            before = total.get(part, Tally(0.0, 0.0))
            total[part] = Tally(before.covered + tally.covered, before.rollouts + tally.rollouts)
    return total


def low(window: Mapping[Part, Tally], before: AbstractSet[Part]) -> set[Part]:
    """Return the parts whose coverage is low, given those that were low before; a part of which little is known stays what it was."""
    found = set()
    for part in window.keys() | before:
        tally = window.get(part)
        if tally is None or tally.rollouts < FEWEST_ROLLOUTS:
            is_low = part in before
        else:
            is_low = tally.share < (RECOVERED if part in before else LOW)
        if is_low:
            found.add(part)
    return found


def uncovered_in_a_row(before: Mapping[Part, int], batch: Mapping[Part, Tally]) -> dict[Part, int]:
    """Return in how many batches in a row a part had rollouts of which none was covered. A batch without the part says nothing of it."""
    after = dict(before)
    for part, tally in batch.items():
        after[part] = 0 if tally.covered else after.get(part, 0) + 1
    return after
