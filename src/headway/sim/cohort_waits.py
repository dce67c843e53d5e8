"""Why the gate was closed in the cohort stepper, and the trainer without a batch: units waited for slots, or staleness let none start.

Units that wait for slots start in turn, and when the last one will is worked out ahead, on the generation clock. Until then the gate is
closed by max_concurrent, weight syncs in between included, and by staleness for the rest of the time until the next version.
"""

from __future__ import annotations

from headway.sim.cohort_figures import CohortBooks
from headway.sim.intervals import NO_BATCH


class Closed:
    """What has closed the gate so far, told to the books. `wall` and `generated`: an instant on the clock of that name."""

    def __init__(self, books: CohortBooks) -> None:
        self._books = books
        self._noted = 0.0  # until when the books know, wall clock
        self._until = 0.0  # when the last that waits for a slot will have one, generation clock
        self._held: list[tuple[float, float]] = []  # by max_concurrent, wall clock: of this a trainer that waits may be told

    def note(self, wall: float, generated: float) -> None:
        """Tell the books what has held admission up since the last time."""
        held = self._held_until(wall, generated)
        self._books.closed(self._noted, held, "concurrency")
        self._books.closed(held, wall, "staleness")
        if held > self._noted:
            self._held.append((self._noted, held))
        self._noted = wall

    def queued(self, until: float) -> None:
        """Hear when, on the generation clock, the last of those that wait for slots will have one."""
        self._until = until

    def waited(self, since: float, full: float, wall: float, generated: float) -> None:
        """Tell the books why no batch was full from `since` to `full`, wall clock, not later than now."""
        self._held = [stretch for stretch in self._held if stretch[1] > since]
        for begin, end in [*self._held, (self._noted, self._held_until(wall, generated))]:
            first, last = max(begin, since), min(end, full)
            if first < last:
                self._books.waited(since, first, NO_BATCH["staleness"])
                self._books.waited(first, last, NO_BATCH["concurrency"])
                since = last
        self._books.waited(since, full, NO_BATCH["staleness"])

    def _held_until(self, wall: float, generated: float) -> float:
        """Return until when units waited for slots since the books were told last, wall clock."""
        return wall if self._until > generated else max(self._noted, self._books.wall_of(self._until))
