"""The engine pool knows which engines serve: a rollout takes its engine here, and waits while none does.

An engine *serves* (also while a weight sync holds it up: requests wait there), or it is *lost*: dead, out of reach, or with weights that
nobody can vouch for. Who notices that tells the pool (`lost`); who has given it the right weights says so too (`serves`). Nothing is sent
to a lost engine. When none has served for `lost_timeout_seconds` the run ends, named after what was lost; the time in which somebody is
`returning` an engine, within limits of his own, does not count.

Engines come and go. One that `joins` is lost until it serves. One that `leaves` serves what is in flight there, and nothing else; with the
last of it, or once it is lost, it *has left*. A rollout keeps its place for all its turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from headway.errors import EngineFailed, HeadwayError
from headway.events import AnyEvent, EngineState
from headway.protocols import Engine
from headway.rules.lineage import served_version
from headway.rules.scheduling import EngineLoad, next_engine
from headway.types import Checkpoint, EngineKind

State = Literal["serving", "syncing", "lost", "left"]

_log = logging.getLogger("headway")


@dataclass(slots=True, eq=False)
class Place:
    """A rollout's place at an engine, until it is released. `cut`: the engine hangs, so what was asked of it is given up.

    `give_up` does that; unset, the task that took the place is cancelled.
    """

    name: str
    url: str
    losses: int
    task: asyncio.Task[object] | None
    kind: EngineKind = "vllm"
    cut: bool = False
    give_up: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class _Seat:
    """What is known of one engine. `taken`: when it was chosen last, in choices. `leaves`: nothing new is sent to it."""

    engine: Engine
    state: State = "lost"
    leaves: bool = False
    cause: HeadwayError = field(default_factory=lambda: EngineFailed("it was never given weights"))
    checkpoint: Checkpoint | None = None
    places: set[Place] = field(default_factory=set)
    taken: int = 0
    losses: int = 0
    returning: int = 0
    deeds: int = 0

    @property
    def serves(self) -> bool:
        """Whether what it is sent is answered, if only after a weight sync."""
        return self.state in {"serving", "syncing"}


class EnginePool:
    """The engines of a run. `weights`: the newest checkpoint that one of them serves.

    `start_timeout_seconds`: how long the run does without any at its start, if that is longer than `lost_timeout_seconds`.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        record: Callable[[AnyEvent], None],
        clock: Callable[[], float],
        lost_timeout_seconds: float,
        start_timeout_seconds: float = 0.0,
    ) -> None:
        self.weights: Checkpoint | None = None
        self._seats = {engine.name: _Seat(engine) for engine in engines}  # those of engines that have left stay
        self._record = record
        self._clock = clock
        self._lost_timeout_seconds = lost_timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._changed = asyncio.Event()
        self._choices = 0

    async def acquire(self) -> Place:
        """Take a place at the least loaded engine that serves, rather not at one under a weight sync; waits while none serves."""
        while not (load := {name: _load(seat) for name, seat in self._seats.items() if _takes(seat)}):
            await self._change()
        seat = self._seats[next_engine(load)]
        self._choices += 1
        seat.taken = self._choices
        place = Place(seat.engine.name, seat.engine.url, seat.losses, asyncio.current_task(), seat.engine.kind)
        seat.places.add(place)
        return place

    def release(self, place: Place) -> None:
        """Give a place back."""
        seat = self._seats[place.name]
        seat.places.discard(place)
        self._see_off(seat)

    def joins(self, engine: Engine) -> None:
        """Count an engine among those that there are; nothing is sent to it before it `serves`. Its name must be new."""
        if engine.name in self._seats:
            raise ValueError(f"{engine.name} is, or was, another engine")
        self._seats[engine.name] = _Seat(engine)
        _log.info("%s joins: %s", engine.name, engine.url)
        self._changed.set()

    def leaves(self, name: str) -> None:
        """Send nothing new to an engine: it has left with the last rollout that is in flight there."""
        seat = self._seats[name]
        if not seat.leaves:
            seat.leaves = True
            _log.info("%s leaves: %d rollouts are in flight there", name, len(seat.places))
            self._say(seat, "leaving")
            self._see_off(seat)

    def stays(self, name: str) -> None:
        """Use an engine again that was about to leave; no effect on one that was not, or has left."""
        seat = self._seats[name]
        if seat.leaves and seat.state != "left":
            seat.leaves = False
            _log.info("%s stays", name)
            self._say(seat, "serving")

    async def has_left(self, name: str) -> bool:
        """Wait until an engine that leaves has left; False: it stays after all."""
        seat = self._seats[name]
        await self._until(lambda: seat.state == "left" or not seat.leaves)
        return seat.state == "left"

    async def until_others(self, than: Collection[str]) -> None:
        """Wait until the engines that there are have other names than these."""
        await self._until(lambda: {name for name, seat in self._seats.items() if seat.state != "left"} != set(than))

    async def until_serving(self) -> None:
        """Wait until an engine serves."""
        await self._until(lambda: bool(self.serving))

    def worked(self, name: str) -> None:
        """Note that a rollout has finished at an engine."""
        self._seats[name].deeds += 1

    def lost_since(self, place: Place) -> bool:
        """Whether the engine was lost since the place was taken."""
        return self._seats[place.name].losses != place.losses

    def lost(self, name: str, cause: HeadwayError, *, hangs: bool = False) -> None:
        """Send nothing to this engine until it `serves`. `hangs`: nor will it ever answer, so attempts there are cut short."""
        seat = self._seats[name]
        seat.cause = cause
        if seat.serves:
            seat.state = "lost"
            seat.losses += 1
            _log.warning("%s is lost: %s", name, cause)
            self._say(seat, "lost")
        self._see_off(seat)
        if hangs:
            for place in list(seat.places):
                if not place.cut and place.task is not None:
                    place.cut = True
                    (place.give_up or place.task.cancel)()

    def syncs(self, name: str) -> None:
        """Note that the engine is being given other weights."""
        seat = self._seats[name]
        if seat.serves:
            seat.state = "syncing"

    def serves(self, name: str, checkpoint: Checkpoint) -> None:
        """Count on an engine: it serves these weights, and says so."""
        seat = self._seats[name]
        if seat.state == "left":
            return
        if seat.state == "lost" and seat.losses:
            _log.info("%s serves again, version %d", name, checkpoint.version)
        seat.deeds += seat.state == "syncing"
        seat.state, seat.checkpoint = "serving", checkpoint
        if self.weights is None or checkpoint.version >= self.weights.version:
            self.weights = checkpoint
        self._say(seat, "leaving" if seat.leaves else "serving")

    @contextmanager
    def returning(self, name: str) -> Iterator[None]:
        """Within the block somebody brings the engine back, for as long as he sees fit."""
        seat = self._seats[name]
        seat.returning += 1
        self._changed.set()
        try:
            yield
        finally:
            seat.returning -= 1
            self._changed.set()

    def is_returning(self, name: str) -> bool:
        """Whether somebody is bringing the engine back."""
        return self._seats[name].returning > 0

    async def returned(self, name: str) -> None:
        """Wait until whoever brings the engine back has ended."""
        await self._until(lambda: not self.is_returning(name))

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
                here = [seat for seat in self._seats.values() if seat.state != "left"]
                raise _gone(f"no engine has served for {limit:g} s ({key})", here) from (here[0].cause if here else None)

    @property
    def engines(self) -> list[Engine]:
        """The engines that there are: all but those that have left."""
        return [seat.engine for seat in self._seats.values() if seat.state != "left"]

    @property
    def serving(self) -> list[Engine]:
        """The engines that serve, also those that leave."""
        return [seat.engine for seat in self._seats.values() if seat.serves]

    @property
    def version(self) -> int:
        """The version that may be counted on: the oldest that a serving engine serves; -1: none serves."""
        return served_version(seat.checkpoint.version for seat in self._seats.values() if seat.serves and seat.checkpoint)

    @property
    def load(self) -> Mapping[str, int]:
        """Rollouts in flight, by engine address."""
        return {seat.engine.url: len(seat.places) for seat in self._seats.values() if seat.state != "left"}

    @property
    def states(self) -> Mapping[str, str]:
        """What each engine does, for people: `serving x-5`, `syncing x-5`, `leaving x-5`, `lost`."""
        return {name: _described(seat) for name, seat in self._seats.items() if seat.state != "left"}

    def state(self, name: str) -> State:
        """Return what an engine does."""
        return self._seats[name].state

    def label(self, name: str) -> str:
        """Return the label that an engine was given last; empty: none yet."""
        checkpoint = self._seats[name].checkpoint
        return checkpoint.label if checkpoint else ""

    def deeds(self, name: str) -> int:
        """Return how many rollouts have finished at an engine and how many syncs it took, in all: more of them means that it works."""
        return self._seats[name].deeds

    def _idles(self) -> bool:
        """Whether no engine takes rollouts, and nobody brings one back."""
        return not any(_takes(seat) or (seat.returning and seat.state != "left") for seat in self._seats.values())

    def _see_off(self, seat: _Seat) -> None:
        if seat.leaves and seat.state != "left" and not (seat.serves and seat.places):
            seat.state = "left"
            _log.info("%s has left", seat.engine.name)
            self._say(seat, "left")

    def _say(self, seat: _Seat, state: Literal["serving", "leaving", "lost", "left"]) -> None:
        self._record(EngineState(self._clock(), seat.engine.name, state, seat.checkpoint.label if seat.checkpoint else ""))
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _takes(seat: _Seat) -> bool:
    return seat.serves and not seat.leaves


def _load(seat: _Seat) -> EngineLoad:
    return EngineLoad(syncing=seat.state == "syncing", rollouts=len(seat.places), taken=seat.taken)


def _described(seat: _Seat) -> str:
    doing = "leaving" if seat.leaves else seat.state
    return f"{doing} {seat.checkpoint.label}" if seat.serves and seat.checkpoint else doing


def _gone(how: str, here: Sequence[_Seat]) -> EngineFailed:
    causes = "; ".join(f"{seat.engine.name} was lost: {seat.cause}" for seat in here) or "engine.urls_file names none"
    return EngineFailed(f"{how}: {causes}", detail="\n".join(seat.cause.detail for seat in here if seat.cause.detail))
