"""The engine pool knows which engines serve: a rollout takes its engine here, and waits while none does.

An engine *serves* (also while a weight sync holds it up: requests wait there), or it is *lost*: dead, out of reach, or with weights that
nobody can vouch for. Who notices that tells the pool (`lost`); who has given it the right weights says so too (`serves`). Nothing is sent
to a lost engine. When none has served for `lost_timeout_seconds` the run ends, named after what was lost; the time in which somebody is
`returning` an engine, within limits of his own, does not count.

Engines come and go. One that `joins` is lost until it serves. One that `leaves` serves what is in flight there, and nothing else; with the
last of it it *has left*, or once it is lost: then what is in flight there is cut short. A rollout keeps its place for all its turns.

`waits` (engine.weight_sync = "wait"): no rollout has tokens of two versions. Before a sync an engine *drains*: nothing new is sent to it
until it serves the new weights, and the sync waits until its last place is given back. Who waits for a place holds none, and who holds one
needs nothing but its engine and its environment; so drains end. A rollout moves to an engine with the same weights, or not at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from headway.errors import EngineFailed, EngineUnreachable, HeadwayError
from headway.events import AnyEvent
from headway.flow.engine_seats import EngineSeats, Place, Seat
from headway.protocols import Engine
from headway.rules.scheduling import next_engine
from headway.types import Checkpoint

__all__ = ["EnginePool", "Place"]

_log = logging.getLogger("headway.engines")  # told at the terminal, too (headway.launch.telling)
_MOST_TOLD = 4  # causes of one engine that is tried again for ever


class EnginePool(EngineSeats):
    """The engines of a run. `weights`: the newest checkpoint that one of them serves.

    `start_timeout_seconds`: how long the run does without any at its start, if that is longer than `lost_timeout_seconds`. `waits`:
    syncs wait for rollouts.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        record: Callable[[AnyEvent], None],
        clock: Callable[[], float],
        lost_timeout_seconds: float,
        start_timeout_seconds: float = 0.0,
        waits: bool = False,
    ) -> None:
        super().__init__(engines, record=record, clock=clock)
        self.weights: Checkpoint | None = None
        self._waits = waits
        self._lost_timeout_seconds = lost_timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._choices = 0

    async def acquire(self) -> Place:
        """Take a place at the least loaded engine that serves, rather not at one under a weight sync; waits while none takes any."""
        while not (seats := [seat for seat in self._seats.values() if seat.takes]):
            await self._change()
        return self._choose(seats)

    async def acquire_instead(self, place: Place) -> Place | None:
        """Give a place up for another, as `acquire`; None: going on with other weights is not allowed, and there are no others."""
        self.release(place)
        while not (seats := [seat for seat in self._seats.values() if seat.takes]):
            await self._change()
        if self._waits and not (seats := [seat for seat in seats if seat.label == place.label]):
            return None
        return self._choose(seats)

    def _choose(self, seats: Sequence[Seat]) -> Place:
        seat = seats[0] if len(seats) == 1 else next_engine(seats, Seat.load)
        self._choices += 1
        seat.taken = self._choices
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  a coroutine runs in a task
        place = Place(seat.engine.name, seat.engine.url, seat.losses, task, seat.engine.kind, seat.label)
        seat.places.add(place)
        return place

    def release(self, place: Place) -> None:
        """Give a place back."""
        seat = self._seat(place.name)
        seat.places.discard(place)
        self._see_off(seat)
        if self._waits and not seat.places:
            self._changed.set()

    def joins(self, engine: Engine) -> None:
        """Count an engine among those that there are; nothing is sent to it before it `serves`. Its name must be new."""
        if engine.name in self._seats or engine.name in self._left:
            raise ValueError(f"{engine.name} is, or was, another engine")
        self._seats[engine.name] = Seat(engine, joined=True)
        _log.info("%s joins: %s", engine.name, engine.url)
        self._changed.set()

    def leaves(self, name: str) -> None:
        """Send nothing new to an engine: it has left with the last rollout that is in flight there."""
        seat = self._seat(name)
        if not seat.leaves:
            seat.leaves = True
            _log.info("%s leaves: %s in flight there", name, _counted(len(seat.places)))
            self._say(seat, "leaving")
            self._see_off(seat)

    def stays(self, name: str) -> None:
        """Use an engine again that was about to leave; no effect on one that was not, or has left."""
        seat = self._seat(name)
        if seat.leaves and seat.state != "left":
            seat.leaves = False
            _log.info("%s stays", name)
            self._say(seat, "draining" if seat.drains else "serving")

    async def until_open(self) -> None:
        """Wait while all engines that serve are drained or synced; returns at once where none serves."""
        await self._until(lambda: self.is_open)

    async def drained(self, name: str) -> bool:
        """Have an engine that serves ready for other weights: it takes no rollouts until it serves them, and its last one has ended.

        False: it was lost meanwhile, or has left. Returns at once unless the pool `waits`.
        """
        seat = self._seat(name)
        if not self._waits:
            return True
        seat.drains = True
        if seat.places and not seat.leaves:
            self._say(seat, "draining")
        await self._until(lambda: not (seat.drains and seat.places))
        return seat.drains and seat.serves

    async def vacated(self, name: str, label: str = "") -> None:
        """Have the rollouts moved that an engine which is lost, or has left, served with other weights than these, and wait for that.

        Otherwise one that has not noticed would go on there with what the engine serves next. Returns at once unless the pool `waits`.
        """
        seat = self._seat(name)
        if self._waits:
            _cut(place for place in seat.places if place.label != label)
            await self._until(lambda: all(place.label == label for place in seat.places))

    def worked(self, place: Place) -> None:
        """Note that a rollout has finished at this place. Of an engine that was lost in the meantime that says nothing."""
        self._seat(place.name).deeds += not self.lost_since(place)

    def lost_since(self, place: Place) -> bool:
        """Whether the engine was lost since the place was taken."""
        return self._seat(place.name).losses != place.losses

    def lost(self, name: str, cause: HeadwayError, *, hangs: bool = False) -> None:
        """Send nothing to this engine until it `serves`. `hangs`: nor will it ever answer, so attempts there are cut short."""
        seat = self._seat(name)
        seat.cause = cause
        if seat.serves:
            seat.state, seat.drains = "lost", False
            seat.losses += 1
            _log.warning("%s is lost: %s", name, cause)
            self._say(seat, "lost")
        elif seat.state == "lost" and not seat.leaves and not (seat.losses and isinstance(cause, EngineUnreachable)):
            self._tell_why(seat, str(cause))
        self._see_off(seat)
        if hangs:
            _cut(seat.places)

    def syncs(self, name: str) -> None:
        """Note that the engine is being given other weights."""
        seat = self._seat(name)
        if seat.serves:
            seat.state = "syncing"

    def serves(self, name: str, checkpoint: Checkpoint) -> None:
        """Count on an engine: it serves these weights, and says so."""
        seat = self._seat(name)
        if seat.state == "left":
            return
        if seat.state == "lost" and (seat.losses or seat.joined):
            _log.info("%s serves%s, version %d", name, " again" if seat.losses else "", checkpoint.version)
        seat.deeds += seat.state == "syncing"
        seat.state, seat.checkpoint, seat.drains = "serving", checkpoint, False
        seat.told.clear()
        if self.weights is None or checkpoint.version >= self.weights.version:
            self.weights = checkpoint
        self._say(seat, "leaving" if seat.leaves else "serving")

    @contextmanager
    def returning(self, name: str) -> Iterator[None]:
        """Within the block somebody brings the engine back, for as long as he sees fit."""
        seat = self._seat(name)
        seat.returning += 1
        self._changed.set()
        try:
            yield
        finally:
            seat.returning -= 1
            self._changed.set()

    async def run(self) -> None:
        """End the run (EngineFailed) when no engine has served for too long."""
        while True:
            await self._until(self._idles)
            first = self.weights is None and self._start_timeout_seconds > self._lost_timeout_seconds
            limit = self._start_timeout_seconds if first else self._lost_timeout_seconds
            try:
                async with asyncio.timeout(limit):
                    await self._until(lambda: not self._idles())
            except TimeoutError:
                key = "engine.start_timeout_seconds" if first else "engine.lost_timeout_seconds"
                here = list(self._seats.values())
                raise _gone(f"no engine has served for {limit:g} s ({key})", here) from (here[0].cause if here else None)

    def _idles(self) -> bool:
        """Whether no engine takes rollouts, or will once it is synced, and nobody brings one back."""
        return not any(seat.stays or seat.returning for seat in self._seats.values())

    @staticmethod
    def _tell_why(seat: Seat, cause: str) -> None:
        """Log once why an engine that is tried again for ever does not serve."""
        if cause not in seat.told and len(seat.told) < _MOST_TOLD:
            seat.told.add(cause)
            _log.warning("%s does not serve yet, and is tried again: %s", seat.engine.name, cause)

    def _see_off(self, seat: Seat) -> None:
        if seat.leaves and seat.state != "left" and not (seat.serves and seat.places):
            seat.state = "left"
            self._left[seat.engine.name] = self._seats.pop(seat.engine.name)
            _log.info("%s has left", seat.engine.name)
            self._say(seat, "left")
            _cut(seat.places)  # of one that was lost: from here on nobody looks whether it hangs


def _cut(places: Iterable[Place]) -> None:
    for place in list(places):
        if not place.cut:
            place.cut = True
            (place.give_up or place.task.cancel)()


def _counted(rollouts: int) -> str:
    return "1 rollout is" if rollouts == 1 else f"{rollouts} rollouts are"


def _gone(how: str, here: Sequence[Seat]) -> EngineFailed:
    causes = "; ".join(f"{seat.engine.name} was lost: {seat.cause}" for seat in here) or "engine.urls_file names none"
    return EngineFailed(f"{how}: {causes}", detail="\n".join(seat.cause.detail for seat in here if seat.cause.detail))
