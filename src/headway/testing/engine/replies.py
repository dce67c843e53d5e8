"""Which rule of the fake engine's script is for a request, and so what is replied: the first that fires, each counting for itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from headway.testing.engine.calls import GENERATIONS, PROBE
from headway.testing.engine.script import Reply, Rule
from headway.testing.rules import first_firing


class Replies:
    """The replies that `rules` give, or else `default`: that is for generations, and for probes only where it is about logprobs."""

    def __init__(self, rules: Sequence[Rule], default: Reply) -> None:
        self.rules = rules
        self.default = default
        self._counts: Counter[int] = Counter()

    def replace(self, rules: Sequence[Rule]) -> None:
        """Go by other rules, counts from zero."""
        self.rules, self._counts = rules, Counter()

    def to(self, facts: dict[str, Any]) -> Reply:
        """Return what the first rule that fires says. A rule that names no path is for generations."""
        generation = facts["path"] in GENERATIONS
        probes = facts["purpose"] == PROBE
        rules = [(index, rule) for index, rule in enumerate(self.rules) if _is_for(rule, generation=generation, probes=probes)]

        def count(place: int) -> int:
            self._counts[rules[place][0]] += 1
            return self._counts[rules[place][0]]

        fired = first_firing([rule for _, rule in rules], facts, count)
        if fired is not None:
            return fired.do
        return self.default if generation and (not probes or self.default.logprobs == "raw") else Reply()


def _is_for(rule: Rule, *, generation: bool, probes: bool) -> bool:
    """Whether a rule is for requests of this kind at all."""
    if probes:
        return rule.do.logprobs == "raw" or bool({"purpose", "request_id"} & rule.match.keys())
    return generation or "path" in rule.match
