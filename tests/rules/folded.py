"""Short histories and the ledgers that they fold to."""

from headway.events import Admitted, Finished, Ready
from headway.rules.ledger import Ledger, apply


def fold(*events):
    """Return the ledger of a history."""
    ledger = Ledger()
    for event in events:
        apply(ledger, event)
    return ledger


def completed(number, birth):
    """Return the history of a group of one that became ready."""
    return (
        Admitted(0.0, number, f"p{number}", 0, 1, birth),
        Finished(0.0, number, 0, 0, 1.0, 5, 4, birth, birth, size=3),
        Ready(0.0, number, zero_advantage=False),
    )
