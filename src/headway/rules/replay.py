"""Where a replayed or external group may go: into a batch that can spare a live one.

A place for it lowers Bmin(j) by one, which STALENESS.md allows only while H(k) still holds with the lowered value, and which never undoes
an admission. That slack is the whole budget of replay; without it, ingest answers 429 and a replay source waits.
"""

from __future__ import annotations

import math

from headway.rules.admission import GateLimits, capacity_by_staleness, steps_ahead
from headway.rules.batching import no_more_groups
from headway.rules.deadlines import last_tight
from headway.rules.view import LedgerView


def place(ledger: LedgerView, limits: GateLimits) -> int | None:
    """Return the batch that may take one more group that is not live, the earliest; None: there is no slack.

    They are trained beside live groups: once none of those can come any more, none is taken in, or each would be a last batch of its own.
    """
    if ledger.draining or ledger.version < 0 or no_more_groups(ledger) or capacity_by_staleness(ledger, limits) <= 0:
        return None
    bounded = limits.enforce == "admission" and limits.on_stale != "train"  # mask does not need H(k), and masks less while it holds
    tight = last_tight(ledger, limits) if bounded else ledger.next_batch - 1
    return next((j for j in _window(ledger, limits) if j > tight and ledger.promised.get(j, 0) < limits.replayed_groups), None)


def reserved(ledger: LedgerView, limits: GateLimits, waiting: int) -> int:
    """Return how many groups' worth of capacity live prompts leave to `waiting` groups that are not live, so that neither starves.

    None while no batch may take one: what is kept for nobody would only idle.
    """
    if not waiting or place(ledger, limits) is None:
        return 0
    room = sum(max(0, limits.replayed_groups - ledger.promised.get(j, 0)) for j in _window(ledger, limits))
    return min(waiting, room)


def _window(ledger: LedgerView, limits: GateLimits) -> range:
    """Return the batches that take in what starts now."""
    k = ledger.next_batch
    ahead = limits.max_staleness if limits.enforce == "ship" else math.floor(steps_ahead(ledger, limits))
    last = max(ledger.version, k if limits.enforce == "ship" else 0) + ahead
    return range(k, min(last, limits.steps - 1) + 1)
