"""The coverage guard reads each batch's row of metrics: it warns of what hardly trains, ends a run that cannot learn, and gives advice.

A warning comes once per episode: when the head coverage of an environment, or of a tenth of its rollouts by length, falls below three
quarters.
Advice comes rarely: after 20 batches, 40, 80, ... (`rules.pacing`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from typing import Any

from headway.errors import HeadNeverTrained
from headway.flow.watch import Watch
from headway.rules.coverage import WINDOW_BATCHES, Part, Tally, low, summed, tallies, uncovered_in_a_row
from headway.rules.pacing import advice
from headway.settings import RolloutSection

_log = logging.getLogger("headway")
FIRST_ADVICE = 20  # batches


class CoverageGuard:
    """Heeds one row after the other; raises HeadNeverTrained."""

    def __init__(self, *, watch: Watch, rollout: RolloutSection, max_uncovered_batches: int) -> None:
        self._watch = watch
        self._rollout = rollout
        self._max_uncovered_batches = max_uncovered_batches
        self._recent: deque[dict[Part, Tally]] = deque(maxlen=WINDOW_BATCHES)
        self._fates: deque[Mapping[str, int]] = deque(maxlen=FIRST_ADVICE)
        self._low: AbstractSet[Part] = frozenset()
        self._in_a_row: dict[Part, int] = {}
        self._batches = 0
        self._next_advice = FIRST_ADVICE

    def heed(self, row: Mapping[str, Any]) -> None:
        """Take in a batch's row."""
        batch = tallies(row)
        self._recent.append(batch)
        self._fates.append(row["token_fates"])
        self._batches += 1
        self._warn(summed(self._recent))
        self._in_a_row = uncovered_in_a_row(self._in_a_row, batch)
        limit = self._max_uncovered_batches
        over = [part for part, batches in self._in_a_row.items() if 0 < limit <= batches]
        if over:
            raise HeadNeverTrained(
                f"in {limit} batches in a row (run.max_uncovered_batches) no rollout of {_named(over[0])} had its first token trained on: "
                f"it is never learned from; {self._remedy()}"
            )
        if self._batches >= self._next_advice and self._rollout.max_staleness:  # on-policy is a choice: its costs are known
            self._next_advice *= 2
            self._advise()

    def _warn(self, window: Mapping[Part, Tally]) -> None:
        now = low(window, self._low)
        for environment, fresh in groupby(sorted(now - self._low, key=_order), lambda part: part.environment):
            parts, whole = list(fresh), Part(environment)
            if whole in now - self._low:
                worst = min((part for part in parts if part != whole), key=lambda part: window[part].share, default=whole)
                parts = list(dict.fromkeys((whole, worst)))
            elif whole in now:
                continue  # told already, and its parts with it
            _log.warning(
                'environment "%s", last %d batches: the first token was trained on in only %s: early decisions are hardly learned from; %s',
                environment,
                len(self._recent),
                _listed([f"{window[part].share:.0%} of {_tenth(part)}" for part in parts]),
                self._remedy(),
            )
        self._low = now

    def _advise(self) -> None:
        ledger, rollout = self._watch.now, self._rollout
        sampled = sum(sum(fates.values()) for fates in self._fates)
        everyone = [tally for part, tally in summed(self._recent).items() if part.tenth is None]
        rollouts = sum(tally.rollouts for tally in everyone)
        lines = advice(
            on_stale=rollout.on_stale,
            max_staleness=rollout.max_staleness,
            latency_seconds=ledger.latency_seconds,
            cycle_seconds=ledger.cycle_seconds,
            masked_share=sum(fates["masked"] for fates in self._fates) / sampled if sampled else None,
            head_coverage=sum(tally.covered for tally in everyone) / rollouts if rollouts else None,
            timeout_seconds=rollout.timeout_seconds,
        )
        for line in lines:
            _log.info("advice after %d batches: %s", self._batches, line)

    def _remedy(self) -> str:
        return (
            f"raise rollout.max_staleness (it is {self._rollout.max_staleness}) or rollout.groups_per_batch, "
            'or set rollout.on_stale = "train" with a trainer.loss that corrects'
        )


def _order(part: Part) -> tuple[str, int]:
    return part.environment, -1 if part.tenth is None else part.tenth


def _named(part: Part) -> str:
    return f'environment "{part.environment}"' + ("" if part.tenth is None else f" in {_tenth(part)}")


def _tenth(part: Part) -> str:
    if part.tenth is None:
        return "its rollouts"
    return {0: "the shortest tenth", 9: "the longest tenth"}.get(part.tenth, f"tenth {part.tenth + 1} by length")


def _listed(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]
