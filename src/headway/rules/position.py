"""How far a run has come in its prompts: which ids of the newest epoch it has admitted. A fold of the journal's admissions.

By ids and not by a count: the source may have grown or shrunk by the time that the run is taken up again, and what was read ahead and not
admitted has not been consumed. Prompts come in the order of their epochs, so of an epoch that is over only those are left that wait to be
tried again; these the ledger knows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.events import Admitted
from headway.rules.view import LedgerView
from headway.types import DataPosition


@dataclass(slots=True)
class Consumed:
    """The fold's accumulator: of `epoch`, the newest one reached, these `ids` have been admitted. Lives as long as a run is taken up."""

    epoch: int = 0
    ids: set[str] = field(default_factory=set)

    def admitted(self, event: Admitted) -> None:
        """Fold one admission in. A prompt that is tried again in an older epoch changes nothing."""
        if event.epoch > self.epoch:
            self.epoch = event.epoch
            self.ids = {event.prompt_id}
        elif event.epoch == self.epoch:
            self.ids.add(event.prompt_id)

    def position(self, ledger: LedgerView) -> DataPosition:
        """Return what of the source is left."""
        return DataPosition(self.epoch, frozenset(self.ids), dict(ledger.waiting))
