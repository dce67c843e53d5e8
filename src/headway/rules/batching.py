"""When a batch is formed, of which groups, and which groups may be in one.

Line "form" of STALENESS.md: batch k is formed only while `k - (newest trained version) <= max_lead`, from the oldest-birth ready groups
(optimal by exchange), as soon as Bmin(k) are ready.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from headway.rules.admission import GateLimits
from headway.rules.view import LedgerView, Unit

MAX_REQUEUES = 3  # a prompt whose groups keep going stale is given up after this many further tries
DYNAMIC_SAMPLING_LIMIT = 3  # zero-advantage groups replaced per batch, in batches


def no_more_groups(ledger: LedgerView) -> bool:
    """Whether every group that will ever be ready is ready: nothing runs, and nothing can start."""
    return not ledger.running and (bool(ledger.draining) or (ledger.exhausted and not ledger.waiting_prompts))


def groups_to_take(ledger: LedgerView, limits: GateLimits) -> int:
    """Return how many groups the next batch takes of those ready now, were it formed now; 0: not yet, or never.

    Normally groups_per_batch. At the end of the data the rest makes a smaller tail batch. While the run drains nothing more is formed: what
    is ready stays in the journal.
    """
    if ledger.draining:
        return 0
    size = limits.smallest_batch(ledger.next_batch)
    ready = len(ledger.ready)
    if ready < size and no_more_groups(ledger):
        return ready
    return size if ready >= size else 0


def may_form(ledger: LedgerView, max_lead: int) -> bool:
    """Whether forming the next batch leads training by no more than max_lead."""
    return ledger.next_batch - ledger.trained <= max_lead


def oldest(ready: Mapping[int, Unit], n: int) -> list[int]:
    """Return the ids of the n groups of oldest birth, oldest first; ties by admission order."""
    return heapq.nsmallest(n, ready, key=lambda group: (ready[group].birth, group))


def doomed(members: int, lost: int, *, whole_groups_only: bool) -> bool:
    """Whether a group that lost `lost` members cannot be trained any more, however the others end.

    A partial group needs at least 2 members, to be compared; a group of 1 needs its one.
    """
    if lost == 0:
        return False
    return whole_groups_only or members - lost < min(2, members)
