"""What is known of the engines of a run: a seat for each, what it does, who is served there; and waiting for that to change.

It can be read by anybody; `flow.engine_pool` alone changes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headway.errors import EngineFailed, HeadwayError
from headway.events import AnyEvent, EngineState
from headway.protocols import Engine
from headway.rules.lineage import served_version
from headway.rules.scheduling import EngineLoad
from headway.types import Checkpoint, EngineKind

State = Literal["serving", "syncing", "lost", "left"]


@dataclass(slots=True, eq=False)
class Place:
    """A rollout's place at an engine, until it is released. `label`: of the weights that were served when it was taken.

    `cut`: the engine hangs, or may not be used any more: what was asked of it is given up. `give_up` does that; unset, the task that took
    the place is cancelled.
    """

    name: str
    url: str
    losses: int
    task: asyncio.Task[object]
    kind: EngineKind = "vllm"
    label: str = ""
    cut: bool = False
    give_up: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class Seat:
    """One engine. `joined`: it was not there from the start. `taken`: when it was chosen last, in choices.

    `leaves`: nothing new is sent to it. `drains`: nothing new either, until it serves the weights that it is to be given.
    """

    engine: Engine
    joined: bool = False
    state: State = "lost"
    leaves: bool = False
    drains: bool = False
    cause: HeadwayError = field(default_factory=lambda: EngineFailed("it was never given weights"))
    checkpoint: Checkpoint | None = None
    places: set[Place] = field(default_factory=set)
    taken: int = 0
    losses: int = 0
    returning: int = 0
    deeds: int = 0
    told: set[str] = field(default_factory=set)  # why it does not serve, since it did

    @property
    def serves(self) -> bool:
        """Whether what it is sent is answered, if only after a weight sync."""
        return self.state in {"serving", "syncing"}

    @property
    def stays(self) -> bool:
        """Whether it serves, and is to go on so."""
        return self.serves and not self.leaves

    @property
    def takes(self) -> bool:
        """Whether a rollout may be sent there now. Asked of every engine for every rollout."""
        return not self.leaves and not self.drains and self.state in {"serving", "syncing"}

    @property
    def label(self) -> str:
        """The label of the weights that it was given last; empty: none yet."""
        return self.checkpoint.label if self.checkpoint else ""

    def load(self) -> EngineLoad:
        """Return what it has to do."""
        return self.state == "syncing", len(self.places), self.taken

    @property
    def doing(self) -> Literal["serving", "syncing", "draining", "leaving", "lost", "left"]:
        """What it does, for people."""
        if self.leaves and self.state != "left":
            return "leaving"
        return "draining" if self.drains and self.state == "serving" else self.state


class EngineSeats:
    """The seats of the engines that there are, by name; beside them, where no choice among engines looks, those of who has left."""

    def __init__(self, engines: Sequence[Engine], *, record: Callable[[AnyEvent], None], clock: Callable[[], float]) -> None:
        self._seats = {engine.name: Seat(engine) for engine in engines}
        self._left: dict[str, Seat] = {}  # asked for by name only
        self._record = record
        self._clock = clock
        self._changed = asyncio.Event()

    @property
    def engines(self) -> list[Engine]:
        """The engines that there are: all but those that have left."""
        return [seat.engine for seat in self._seats.values()]

    @property
    def serving(self) -> list[Engine]:
        """The engines that serve, also those that leave."""
        return [seat.engine for seat in self._seats.values() if seat.serves]

    @property
    def version(self) -> int:
        """The version that may be counted on: the oldest that a serving engine serves; -1: none serves."""
        return served_version(seat.checkpoint.version for seat in self._seats.values() if seat.serves and seat.checkpoint)

    @property
    def is_open(self) -> bool:
        """Whether an engine takes rollouts, or none that serves is there to be waited for."""
        return any(seat.takes for seat in self._seats.values()) or not any(seat.stays for seat in self._seats.values())

    @property
    def load(self) -> Mapping[str, int]:
        """Rollouts in flight, by engine address."""
        return {seat.engine.url: len(seat.places) for seat in self._seats.values()}

    @property
    def states(self) -> Mapping[str, str]:
        """What each engine does, for people: `serving x-5`, `draining x-5`, `syncing x-5`, `leaving x-5`, `lost`."""
        return {name: _described(seat) for name, seat in self._seats.items()}

    def state(self, name: str) -> State:
        """Return what an engine does."""
        return self._seat(name).state

    def label(self, name: str) -> str:
        """Return the label that an engine was given last; empty: none yet."""
        return self._seat(name).label

    def deeds(self, name: str) -> int:
        """Return how many rollouts have finished at an engine and how many syncs it took, in all: more of them means that it works."""
        return self._seat(name).deeds

    def is_returning(self, name: str) -> bool:
        """Whether somebody is bringing the engine back."""
        return self._seat(name).returning > 0

    async def returned(self, name: str) -> None:
        """Wait until whoever brings the engine back has ended."""
        await self._until(lambda: not self.is_returning(name))

    async def has_left(self, name: str) -> bool:
        """Wait until an engine that leaves has left; False: it stays after all."""
        seat = self._seat(name)
        await self._until(lambda: seat.state == "left" or not seat.leaves)
        return seat.state == "left"

    async def until_others(self, than: Collection[str]) -> None:
        """Wait until the engines that there are have other names than these."""
        await self._until(lambda: self._seats.keys() != set(than))

    async def until_all_serve(self) -> None:
        """Wait until every engine that there is serves; at once where there is none."""
        await self._until(lambda: all(seat.serves for seat in self._seats.values()))

    async def until_serving(self, *, beside: Collection[str] = ()) -> None:
        """Wait until an engine serves, other than these."""
        await self._until(lambda: any(engine.name not in beside for engine in self.serving))

    def _seat(self, name: str) -> Seat:
        """Return the seat of an engine that there is, or was."""
        return self._seats.get(name) or self._left[name]

    def _say(self, seat: Seat, state: Literal["serving", "draining", "leaving", "lost", "left"]) -> None:
        self._record(EngineState(self._clock(), seat.engine.name, state, seat.label))
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _described(seat: Seat) -> str:
    return f"{seat.doing} {seat.label}" if seat.serves and seat.label else seat.doing
