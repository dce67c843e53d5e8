"""The engine pool knows which engines serve: a rollout takes its engine here, and waits while none does.

An engine *serves* (also while a weight sync holds it up: requests wait there), or it is *lost*: dead, out of reach, or with weights that
nobody can vouch for. Who notices that tells the pool (`lost`); who has given it the right weights says so too (`serves`). Nothing is sent
to a lost engine. When none has served for `lost_timeout_seconds` the run ends, named after what was lost; the time in which somebody is
`returning` an engine, within limits of his own, does not count.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from headway.errors import EngineFailed, HeadwayError
from headway.events import AnyEvent, EngineState
from headway.protocols import Engine
from headway.rules.lineage import served_version
from headway.rules.scheduling import next_engine
from headway.types import Checkpoint, EngineKind

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
    """What is known of one engine. `taken`: when it was chosen last, in choices."""

    engine: Engine
    state: Literal["serving", "syncing", "lost"] = "lost"
    cause: HeadwayError = field(default_factory=lambda: EngineFailed("it was never given weights"))
    checkpoint: Checkpoint | None = None
    places: set[Place] = field(default_factory=set)
    taken: int = 0
    losses: int = 0
    returning: int = 0
    deeds: int = 0


class EnginePool:
    """The engines of a run. `weights`: the newest checkpoint that one of them serves."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        record: Callable[[AnyEvent], None],
        clock: Callable[[], float],
        lost_timeout_seconds: float,
    ) -> None:
        self.engines = engines
        self.weights: Checkpoint | None = None
        self._seats = {engine.name: _Seat(engine) for engine in engines}
        self._record = record
        self._clock = clock
        self._lost_timeout_seconds = lost_timeout_seconds
        self._changed = asyncio.Event()
        self._choices = 0

    async def acquire(self) -> Place:
        """Take a place at the least loaded engine that serves; waits while none does."""
        while not (load := {name: (len(seat.places), seat.taken) for name, seat in self._seats.items() if seat.state != "lost"}):
            self._changed.clear()
            await self._changed.wait()
        seat = self._seats[next_engine(load)]
        self._choices += 1
        seat.taken = self._choices
        place = Place(seat.engine.name, seat.engine.url, seat.losses, asyncio.current_task(), seat.engine.kind)
        seat.places.add(place)
        return place

    def release(self, place: Place) -> None:
        """Give a place back."""
        self._seats[place.name].places.discard(place)

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
        if seat.state != "lost":
            seat.state = "lost"
            seat.losses += 1
            _log.warning("%s is lost: %s", name, cause)
            self._record(EngineState(self._clock(), name, "lost", seat.checkpoint.label if seat.checkpoint else ""))
            self._changed.set()
        if hangs:
            for place in seat.places:
                if not place.cut and place.task is not None:
                    place.cut = True
                    (place.give_up or place.task.cancel)()

    def syncs(self, name: str) -> None:
        """Note that the engine is being given other weights."""
        self._seats[name].state = "syncing"

    def serves(self, name: str, checkpoint: Checkpoint) -> None:
        """Count on an engine: it serves these weights, and says so."""
        seat = self._seats[name]
        if seat.state == "lost" and seat.losses:
            _log.info("%s serves again, version %d", name, checkpoint.version)
        seat.deeds += seat.state == "syncing"
        seat.state, seat.checkpoint = "serving", checkpoint
        if self.weights is None or checkpoint.version >= self.weights.version:
            self.weights = checkpoint
        self._record(EngineState(self._clock(), name, "serving", checkpoint.label))
        self._changed.set()

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
            await self._until(lambda: not self.serving and not self._any_returns())
            try:
                async with asyncio.timeout(self._lost_timeout_seconds):
                    await self._until(lambda: bool(self.serving) or self._any_returns())
            except TimeoutError:
                raise self._gone() from next(iter(self._seats.values())).cause

    @property
    def serving(self) -> list[Engine]:
        """The engines that serve."""
        return [seat.engine for seat in self._seats.values() if seat.state != "lost"]

    @property
    def version(self) -> int:
        """The version that may be counted on: the oldest that a serving engine serves; -1: none serves."""
        return served_version(seat.checkpoint.version for seat in self._seats.values() if seat.state != "lost" and seat.checkpoint)

    @property
    def load(self) -> Mapping[str, int]:
        """Rollouts in flight, by engine address."""
        return {seat.engine.url: len(seat.places) for seat in self._seats.values()}

    @property
    def states(self) -> Mapping[str, str]:
        """What each engine does, for people: `serving x-5`, `syncing x-5`, `lost`."""
        return {name: _described(seat) for name, seat in self._seats.items()}

    def state(self, name: str) -> Literal["serving", "syncing", "lost"]:
        """Return what an engine does."""
        return self._seats[name].state

    def label(self, name: str) -> str:
        """Return the label that an engine was given last; empty: none yet."""
        checkpoint = self._seats[name].checkpoint
        return checkpoint.label if checkpoint else ""

    def deeds(self, name: str) -> int:
        """Return how many rollouts have finished at an engine and how many syncs it took, in all: more of them means that it works."""
        return self._seats[name].deeds

    def _any_returns(self) -> bool:
        return any(seat.returning for seat in self._seats.values())

    def _gone(self) -> EngineFailed:
        causes = "; ".join(f"{name} was lost: {seat.cause}" for name, seat in self._seats.items())
        detail = "\n".join(seat.cause.detail for seat in self._seats.values() if seat.cause.detail)
        return EngineFailed(
            f"no engine has served for {self._lost_timeout_seconds:g} s (engine.lost_timeout_seconds): {causes}", detail=detail
        )

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


def _described(seat: _Seat) -> str:
    return f"{seat.state} {seat.checkpoint.label}" if seat.state != "lost" and seat.checkpoint else seat.state
