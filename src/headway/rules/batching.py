"""When a batch is formed, of which groups, and which groups may be in one.

Line "form" of STALENESS.md: batch k is formed only while `k - (newest trained version) <= max_lead`, from the oldest-birth ready groups
(optimal by exchange), then by on_stale: mask and train as soon as Bmin(k) are ready; wait once H(k + 1) holds for what remains; drop after
cancelling the fewest running groups that make it hold. Replayed and external groups that hold a place in batch k are in it as well.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from headway.rules.admission import GateLimits, capacity_by_staleness
from headway.rules.deadlines import holds_after, oldest_births, overbooked, without
from headway.rules.view import LedgerView, Unit

MAX_REQUEUES = 3  # a prompt whose groups keep going stale is given up after this many further tries
DYNAMIC_SAMPLING_LIMIT = 3  # zero-advantage groups replaced per batch, in batches


def no_more_groups(ledger: LedgerView) -> bool:
    """Whether every group that will ever be ready is ready: nothing runs, and nothing can start."""
    return not ledger.running and (bool(ledger.draining) or (ledger.exhausted and not ledger.waiting_prompts))


def nothing_left(ledger: LedgerView) -> bool:
    """Whether no batch can be formed any more: no group is in line or to come. It stays so: `rules.replay.place` gives no place then."""
    return no_more_groups(ledger) and not ledger.ready and not ledger.ingested


def groups_to_take(ledger: LedgerView, limits: GateLimits) -> int:
    """Return how many live groups the next batch takes of those ready now, were it formed now; -1: not yet, or never.

    Normally Bmin(k), or as many as the token budget holds. At the end of the data the rest makes a smaller tail batch. While the run drains
    nothing more is formed: what is ready stays in the journal.
    """
    k = ledger.next_batch
    if ledger.draining or k >= limits.steps or k in ledger.awaited:
        return -1
    size = limits.live_until(k, k, ledger.promised)
    ready = len(ledger.ready)
    if ready < size:
        left = ready or ledger.ingested
        return ready if left and no_more_groups(ledger) and not ledger.awaited else -1
    return _within_budget(ledger, limits, size) if limits.batch_tokens else size


def _within_budget(ledger: LedgerView, limits: GateLimits, smallest: int) -> int:
    """Return how many ready groups fill the token budget, `smallest` at least; -1 while more may come and there is room for them."""
    if ledger.ready_tokens < limits.batch_tokens and (ledger.running or _may_start(ledger, limits)):
        return -1
    n = tokens = 0
    for group in oldest(ledger.ready, len(ledger.ready)):
        tokens += ledger.ready[group].tokens
        if n >= smallest and tokens > limits.batch_tokens:
            break
        n += 1
    return n


def _may_start(ledger: LedgerView, limits: GateLimits) -> bool:
    return not no_more_groups(ledger) and capacity_by_staleness(ledger, limits) > 0


def may_form(ledger: LedgerView, max_lead: int) -> bool:
    """Whether forming the next batch leads training by no more than max_lead."""
    return ledger.next_batch - ledger.trained <= max_lead


def can_form(ledger: LedgerView, limits: GateLimits) -> bool:
    """Whether the next batch could be formed now, but for its lead over training."""
    return _can_take(groups_to_take(ledger, limits), ledger, limits)


def _can_take(n: int, ledger: LedgerView, limits: GateLimits) -> bool:
    return n >= 0 and (limits.on_stale != "wait" or holds_after(ledger, limits, n))


def in_the_way(ledger: LedgerView, limits: GateLimits, n: int) -> list[int]:
    """Return the fewest groups that must go before batch k may take the n oldest ready ones (`on_stale = "drop"`).

    At each deadline that is overbooked any of the groups due by then would do: running ones go first, of those the ones that have generated
    least. With `enforce = "ship"` H(k) is not kept: what is past its deadline goes, ready groups too, before anything is chosen.
    """
    k, bound = ledger.next_batch, limits.max_staleness
    if limits.enforce == "ship":
        if all(birth + bound >= k for birth in ledger.births):
            return []
        return [group for units in (ledger.ready, ledger.running) for group, unit in units.items() if unit.birth + bound < k]
    if holds_after(ledger, limits, n):
        return []
    remaining = without(ledger.births, oldest_births(ledger.ready_births, n))
    gone: dict[int, None] = {}
    for birth, excess in overbooked(remaining, k + 1, limits, ledger.promised):
        if excess > len(gone):
            gone.update(dict.fromkeys(_cheapest(ledger, birth, n, gone, excess - len(gone))))
    return list(gone)


def _cheapest(ledger: LedgerView, birth: int, n: int, gone: Mapping[int, None], count: int) -> list[int]:
    """Return `count` groups of this birth or an older one that cost least to lose."""
    running = (group for group, unit in ledger.running.items() if unit.birth <= birth and group not in gone)
    chosen = heapq.nsmallest(count, running, key=lambda group: (ledger.running[group].sampled_tokens, -group))
    if len(chosen) < count:  # H(k) was broken before: nothing in a run does that, and the bound holds all the same
        left = oldest(ledger.ready, len(ledger.ready))[n:]
        chosen += [group for group in left if ledger.ready[group].birth <= birth and group not in gone][: count - len(chosen)]
    return chosen


def oldest(ready: Mapping[int, Unit], n: int) -> list[int]:
    """Return the ids of the n groups of oldest birth, oldest first; ties by admission order."""
    return heapq.nsmallest(n, ready, key=lambda group: (ready[group].birth, group))


def chosen(ledger: LedgerView, n: int) -> list[int]:
    """Return the groups of batch k: those that hold a place in it, then the n oldest ready ones.

    When these are the last of all, those that hold a place in a later batch come too: there might be none.
    """
    last = ledger.next_batch if n < len(ledger.ready) or not no_more_groups(ledger) else math.inf
    return [*(group for group, promise in ledger.ingested.items() if promise.k <= last and promise.ready), *oldest(ledger.ready, n)]


def doomed(members: int, lost: int, *, whole_groups_only: bool) -> bool:
    """Whether a group that lost `lost` members cannot be trained any more, however the others end.

    A partial group needs at least 2 members, to be compared; a group of 1 needs its one.
    """
    if lost == 0:
        return False
    return whole_groups_only or members - lost < min(2, members)


def trainer_waits_for(ledger: LedgerView, limits: GateLimits) -> str:
    """Say what the trainer waits for, in words for the progress line."""
    if ledger.next_batch > ledger.trained:
        return "nothing"
    n = groups_to_take(ledger, limits)
    if _can_take(n, ledger, limits):
        return "a batch to be written"
    if n >= 0:
        return 'groups in flight that would grow too old (rollout.on_stale = "wait")'
    if limits.batch_tokens:
        return f"rollouts ({ledger.ready_tokens} of {limits.batch_tokens} tokens)"
    return f"rollouts ({len(ledger.ready)} of {limits.live_until(ledger.next_batch, ledger.next_batch, ledger.promised)} groups)"
