"""Takes an interrupted run up again: folds its journal, asks `rules.resume` what it goes on with, and records that before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.rules.ledger import Ledger
from headway.types import ContinuedGroup, DataPosition, FinishedGroup, ReadyGroup


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """What the components of a resumed run begin with. Everything in it is durable, and its events are in the ledger.

    Rollouts in it are stubs: made from events, `payload` empty, `reference` set. `ready`: complete groups (live ones, and replayed or
    external ones that keep their places), to be in the train sink from the start; `unscored`: complete groups of which the journal has
    no Ready yet (they are running in the ledger), to be scored and sunk; `continued`: groups that start again without their finished members. `shipped_again`: (k, metrics row)
    of persisted batches that are announced to the trainer once more, ascending.
    """

    ledger: Ledger
    ready: Sequence[ReadyGroup] = ()
    unscored: Sequence[FinishedGroup] = ()
    continued: Sequence[ContinuedGroup] = ()
    shipped_again: Sequence[tuple[int, Mapping[str, Any]]] = ()
    position: DataPosition = DataPosition()
