"""Which payloads stay in memory: those that fit into a budget of bytes; the others are read from the journal when they are needed.

Every payload in memory was counted by `held_size` at a moment at which that was within the budget, and left both together: memory holds no
more than the budget, whatever lies on disk.
"""

from __future__ import annotations

from headway.rules.view import LedgerView


def stays_in_memory(ledger: LedgerView, max_held_bytes: int) -> bool:
    """Whether the payload that the ledger has counted last may stay in memory."""
    return ledger.held_size <= max_held_bytes
