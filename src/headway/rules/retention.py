"""Retention: which rollouts, batch directories and bytes of free disk a run goes on with.

    needed(k)  = live groups, and those of the batches from (trained - keep_payloads) on, formed or trained
    retired    = batch directories below trained - keep_batches

Formed batches that are not trained yet are always needed: they may be dissolved and formed again. The ledger remembers the groups of the
last few trained batches only (`rules.ledger.TRAINED_KEPT`), so whoever asks remembers them by batch (`remembered`), for as long as they
are needed. What a process cannot know (a batch that an earlier process formed, longer ago than the ledger remembers) is not guessed:
nothing is unneeded until every batch that counts is known.
"""

from __future__ import annotations

from collections.abc import Mapping

from headway.rules.view import LedgerView

TO_SPARE = 64 * 1024**2  # bytes, or a tenth: so much more must be free before groups start again, or the gate would open and close by turns

_LOOKS = 16  # in as many batches as are kept

Groups = Mapping[int, frozenset[int]]  # by batch


def remembered(known: Groups, ledger: LedgerView, keep_payloads: int) -> dict[int, frozenset[int]]:
    """Return the groups of the batches whose rollouts are still needed: what was known, and what the ledger remembers."""
    first = ledger.trained - keep_payloads
    groups = {k: of for k, of in known.items() if k >= first}
    for k, formed in ledger.formed.items():
        if k >= first and k not in groups:
            groups[k] = frozenset(formed.units) | frozenset(formed.promised)
    return groups


def needed_groups(known: Groups, ledger: LedgerView, keep_payloads: int) -> frozenset[int] | None:
    """Return the groups whose rollouts are needed; None when that cannot be said: then all are."""
    batches = range(max(0, ledger.trained - keep_payloads), ledger.next_batch)
    if not all(k in known for k in batches):
        return None
    return frozenset().union(ledger.running, ledger.ready, ledger.ingested, ledger.interrupted, *(known[k] for k in batches))


def removal_due(trained: int, removed_at: int, keep_payloads: int) -> bool:
    """Whether it is time to look for rollouts that are not needed, when that was done last at version `removed_at`.

    A look costs as much as there is kept. By this it is a few batches' worth a batch, however many are kept; a sixteenth more are.
    """
    return trained - removed_at >= max(1, keep_payloads // _LOOKS)


def retired_below(trained: int, keep_batches: int) -> int:
    """Return the batch below which directories may go; `keep_batches` 0: all are kept."""
    return max(0, trained - keep_batches) if keep_batches else 0


def short_of_space(free_bytes: int, min_free_bytes: int, was_short: bool) -> bool:  # noqa: FBT001 - the state it goes on from
    """Whether no group may start for want of disk space."""
    return free_bytes < min_free_bytes + (min(min_free_bytes // 10, TO_SPARE) if was_short else 0)
