"""Reads the study's rows: means and standard errors by place in the grid, and the rule that was fixed beforehand (README.md)."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
RIVALS = ("wait", "mask", "drop", "train+tis", "train+decoupled_ppo", "train+reinforce")
BOUNDED = ("wait", "mask", "drop")
SAME_LOSS = ("wait", "mask", "drop", "train+decoupled_ppo")  # as the arm mask trains with
MEASURES = {"reward_per_token": "per sampled token", "reward_per_second": "per second"}
COVERED = 0.5


class Place(NamedTuple):
    """A place in the grid: max_staleness = steps_ahead, multiple of the learning rate, share of slow prompts."""

    S: int
    rate: float
    share: float


class Estimate(NamedTuple):
    """A mean over seeds and its standard error (0 for one seed)."""

    mean: float
    error: float
    seeds: int

    def __format__(self, spec: str) -> str:
        """Write `mean ± error`."""
        return f"{self.mean:{spec}} ± {self.error:{spec}}"


class Gap(NamedTuple):
    """What the best rival has over an arm by one measure: in itself, relative to the best, and in standard errors of the difference."""

    best: str
    value: float
    relative: float
    errors: float

    @property
    def within(self) -> bool:
        """Whether the arm is within one standard error of the best (or is it)."""
        return self.errors <= 1.0


def read(path: Path) -> list[Row]:
    """Return the rows of a results file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def estimate(rows: Iterable[Row], key: str) -> Estimate | None:
    """Return the mean of a figure over rows, leaving out those that have none; None when no row has it."""
    values = [row[key] for row in rows if row[key] is not None]
    if not values:
        return None
    mean = sum(values) / len(values)
    if len(values) == 1:
        return Estimate(mean, 0.0, 1)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Estimate(mean, math.sqrt(variance / len(values)), len(values))


def by_place(rows: Iterable[Row]) -> dict[Place, dict[str, list[Row]]]:
    """Return the deciding study's rows by place and arm, in order."""
    grouped: defaultdict[Place, dict[str, list[Row]]] = defaultdict(dict)
    for row in rows:
        if row["lag"] is None:
            grouped[Place(row["S"], row["rate"], row["share"])].setdefault(row["arm"], []).append(row)
    return dict(sorted(grouped.items()))


def by_lag(rows: Iterable[Row]) -> dict[tuple[float, str, int], list[Row]]:
    """Return the collapse study's rows by (learning rate, arm, lag), in order."""
    grouped: defaultdict[tuple[float, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row["lag"] is not None:
            grouped[row["rate"], row["arm"], row["lag"]].append(row)
    return dict(sorted(grouped.items()))


def gap(arms: dict[str, list[Row]], measure: str, *, arm: str = "mask", rivals: Sequence[str] = RIVALS, paired: bool = False) -> Gap:
    """Return what the best rival has over an arm at one place. `paired`: by the differences of runs of the same seed."""
    known = {name: estimate(arms[name], measure) for name in (arm, *rivals) if name in arms}
    found = {name: one for name, one in known.items() if one is not None}
    best = max(found, key=lambda name: found[name].mean)
    top, ours = found[best], found[arm]
    value = top.mean - ours.mean
    error = _paired_error(arms[best], arms[arm], measure) if paired else math.hypot(top.error, ours.error)
    return Gap(best, value, value / top.mean, value / error if error else math.inf if value else 0.0)


def _paired_error(ours: list[Row], theirs: list[Row], measure: str) -> float:
    """Return the standard error of the mean difference between runs of the same seed."""
    other = {row["seed"]: row[measure] for row in theirs}
    differences = [{"difference": row[measure] - other[row["seed"]]} for row in ours if row["seed"] in other]
    found = estimate(differences, "difference")
    return 0.0 if found is None else found.error


Places = dict[Place, dict[str, list[Row]]]


def covered(places: Places, coverage: str = "head_coverage_long", *, threshold: float = COVERED) -> list[Place]:
    """Return the places at which the mask arm's head coverage is not below the threshold: where the rule applies."""
    figures = {place: estimate(arms["mask"], coverage) for place, arms in places.items()}
    return [place for place, one in figures.items() if one is not None and one.mean >= threshold]


def broken(places: Places, where: Sequence[Place], *, arm: str = "mask", **more: Any) -> list[Place]:
    """Return the places among `where` at which an arm is further than one standard error from the best, by one measure or both."""
    return [place for place in where if not all(gap(places[place], measure, arm=arm, **more).within for measure in MEASURES)]
