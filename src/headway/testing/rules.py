"""Faults by rule: which of the things that happen to a fake a rule is for, and at which of them it acts.

A rule matches facts by name: a value equals, a text with `*` or `?` is a pattern, a list offers a choice. It counts what matched it, from
1, and fires at `nth` (a list), at `every` n-th, or, when neither is given, each time; never before `after` matches, never more than
`times`. The first rule that fires decides; rules below it have not seen the thing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import msgspec

R = TypeVar("R", bound="Firing")


class Firing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """When a rule fires; the `do` of its subclasses says what then happens."""

    match: dict[str, Any] = {}
    nth: tuple[int, ...] = ()
    every: int = 0
    after: int = 0
    times: int = 0  # 0: as often as it matches

    def matches(self, facts: Mapping[str, Any]) -> bool:
        """Whether the rule is for this. Raises ValueError for a name that no fact has: such a rule would never fire, in silence."""
        if unknown := sorted(self.match.keys() - facts.keys()):
            raise ValueError(f"a rule matches on {', '.join(unknown)}, and only {', '.join(sorted(facts))} can be matched on")
        return all(_equals(wanted, facts[name]) for name, wanted in self.match.items())

    def fires(self, count: int) -> bool:
        """Whether the rule fires at its `count`-th match, counted from 1."""
        if count <= self.after:
            return False
        if self.nth:
            return count in self.nth
        count -= self.after
        if self.times and count > self.times * max(1, self.every):
            return False
        return not self.every or count % self.every == 0


def first_firing(rules: Sequence[R], facts: Mapping[str, Any], count: Callable[[int], int]) -> R | None:
    """Return the first rule that fires for these facts, or None. `count` adds one to a rule's matches and returns them."""
    for index, rule in enumerate(rules):
        if rule.matches(facts) and rule.fires(count(index)):
            return rule
    return None


def _equals(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, list | tuple) and not isinstance(found, list | tuple):
        return any(_equals(each, found) for each in wanted)
    if isinstance(wanted, str) and isinstance(found, str):
        return fnmatchcase(found, wanted)
    return bool(wanted == found)
