"""The world around simulated runs, which outlives the process of the orchestrator, and the lives that are spent in it.

A `Kill` ends a life without a chance to clean up: whatever its tasks do from then on reaches nobody. Durable is what the journal had
returned or kept, the batches that were written, and the versions that the trainer had completed. The engines' weights and the trainer stay
as they are, unless they die too. The next life takes up what there is.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import wraps
from math import inf
from typing import Any, TypeVar, cast

from headway.events import AnyEvent
from headway.protocols import Entry, Journal
from headway.sim.engine import EngineSettings, SimEngine
from headway.sim.store import KeptBatch, SimBatchStore
from headway.sim.trainer import SimTrainer, TrainerSettings

Thing = TypeVar("Thing")
Result = TypeVar("Result")

LINEAGE = "sim"


@dataclass(frozen=True, slots=True)
class Kill:
    """When a life ends, and what is lost with it.

    `at`: virtual seconds. `commit`: at the life's n-th write to the journal, from 1, of which the first `kept` entries are durable (None:
    all of them, and nobody has heard of it). The trainer and the engines live on unless they die too: the trainer with the batches that it
    had not completed, the engines with all weights but those the run started from. `weights_lost`: how many of the newest versions are
    gone when the next life begins, `down_seconds` later; the trainer then starts again from the newest that is left.
    """

    at: float = inf
    commit: int = 0
    kept: int | None = None
    trainer_dies: bool = False
    engines_die: bool = False
    weights_lost: int = 0
    down_seconds: float = 0.0


class Life:
    """One process of the orchestrator: what it holds of the world lets go of it when it is killed."""

    def __init__(self, kill: Kill | None) -> None:
        self._kill = Kill() if kill is None else kill
        self._over = asyncio.Event()

    def hold(self, thing: Thing, *constants: str) -> Thing:
        """Return the thing as this life may use it: once that is over, calls have no effect and do not return.

        `constants`: its attributes that never change, and are asked for so often that they are kept at hand.
        """
        return cast("Thing", _Held(thing, self._over, constants))

    def journal(self, journal: Journal) -> Journal:
        """Return the journal as this life may use it."""
        return self.hold(cast("Journal", _Journal(journal, self._kill, self._over)) if self._kill.commit else journal)

    def end(self) -> None:
        """Let it be over now, as if it were killed."""
        self._over.set()

    async def spend(self, on: Coroutine[Any, Any, Result]) -> Result | None:
        """Live until the work is done or the life is over (None); then no task of it is left."""
        loop = asyncio.get_running_loop()
        bystanders = asyncio.all_tasks()
        work = loop.create_task(on, name="life")
        over = loop.create_task(self._over.wait(), name="end of a life")
        timer = loop.call_at(self._kill.at, self._over.set) if self._kill.at < inf else None
        try:
            await asyncio.wait([work, over], return_when=asyncio.FIRST_COMPLETED)
            if not self._over.is_set():
                return work.result()
            return None
        finally:
            self._over.set()
            if timer is not None:
                timer.cancel()
            while left := asyncio.all_tasks() - bystanders:
                for task in sorted(left, key=hash):  # in the order in which they were made
                    task.cancel()
                await asyncio.sleep(0)  # and again: some would clean up first
            if not work.cancelled():
                work.exception()  # what it died of is nobody's business


class World:
    """What outlives the orchestrator: engines, the trainer and its versions, written batches. The journal is the caller's."""

    def __init__(
        self, engines: Sequence[EngineSettings], trainer: TrainerSettings, *, store: SimBatchStore, seed: int, version: int = 0
    ) -> None:
        self._engine_settings = engines
        self._trainer_settings = trainer
        self._seed = seed
        self._gone: list[SimEngine | SimTrainer] = []
        self.store = store
        self.engines = self._new_engines()
        self.lineage = LINEAGE
        self.parents: dict[str, str | None] = {}
        self.labels = {version: f"{LINEAGE}-{version}"}  # of complete versions, as they lie on disk
        self.completed = {version: 0.0}  # when
        self.trained: dict[int, KeptBatch] = {}  # what version k + 1 was made of
        self.abandoned: list[tuple[int, KeptBatch]] = []  # what versions that are gone were made of
        self.trainer = self._new_trainer(version)

    def strike(self, kill: Kill) -> None:
        """Lose what is lost with a life that ends now."""
        if not kill.trainer_dies:
            self.trainer.find()
        if kill.engines_die:
            self._gone += self.engines
            self.engines = self._new_engines()

    def wake(self, kill: Kill) -> int:
        """Return the newest complete version, now that the next life begins."""
        self.note_versions()
        newest = max(self.labels)
        if kill.weights_lost:
            newest = max(min(self.labels), newest - kill.weights_lost)
            for version in [version for version in self.labels if version > newest]:
                del self.labels[version], self.completed[version]
                self.abandoned.append((version - 1, self.trained.pop(version - 1)))
        if kill.trainer_dies or kill.weights_lost:
            self._gone.append(self.trainer)
            self.trainer = self._new_trainer(newest)
        return newest

    def fork(self, version: int) -> None:
        """Begin a new lineage at a version."""
        self.parents[child := f"{LINEAGE}{len(self.parents) + 1}"] = self.labels[version]
        self.lineage = self.store.lineage = child
        self._gone.append(self.trainer)
        self.trainer = self._new_trainer(version)

    def note_versions(self) -> None:
        """Note what the trainer has completed by now."""
        for k, (done, batch) in self.trainer.completed().items():
            self.labels.setdefault(k + 1, f"{self.lineage}-{k + 1}")
            self.completed.setdefault(k + 1, done)
            self.trained.setdefault(k, batch)

    @property
    def busy_seconds(self) -> float:
        """Seconds that the trainers spent training, in all."""
        return self.trainer.busy_seconds + sum(one.busy_seconds for one in self._gone if isinstance(one, SimTrainer))

    @property
    def trainer_log(self) -> list[tuple[float, float, str, str]]:
        """What the trainers did, in order: (from, until, state, why), without the time in which they waited for a batch."""
        trainers = [*(one for one in self._gone if isinstance(one, SimTrainer)), self.trainer]
        return [entry for trainer in trainers for entry in trainer.log]

    @property
    def sampled(self) -> int:
        """Tokens that the engines wrote, in all."""
        return sum(one.sampled for one in [*self.engines, *self._gone] if isinstance(one, SimEngine))

    def _new_engines(self) -> list[SimEngine]:
        return [SimEngine(f"engine-{number}", settings) for number, settings in enumerate(self._engine_settings)]

    def _new_trainer(self, version: int) -> SimTrainer:
        return SimTrainer(self._trainer_settings, self.store.batches, lineage=self.lineage, seed=self._seed, version=version)


class _Journal:
    """The journal of a life that ends at one of its writes, if not before."""

    def __init__(self, journal: Journal, kill: Kill, over: asyncio.Event) -> None:
        self._journal = journal
        self._kill = kill
        self._over = over
        self._writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)

    async def append(self, entries: Sequence[Entry]) -> Sequence[AnyEvent]:
        """Write the entries, or as many of them as the kill says."""
        self._writes += 1
        if self._writes != self._kill.commit:
            return await self._journal.append(entries)
        if kept := entries[: self._kill.kept]:
            await self._journal.append(kept)
        self._over.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError  # nobody answers


class _Held:
    """A thing of the world, for as long as a life lasts."""

    def __init__(self, thing: Any, over: asyncio.Event, constants: Sequence[str]) -> None:
        self._thing = thing
        self._over = over
        self.__dict__.update((name, getattr(thing, name)) for name in constants)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._thing, name)
        if not callable(value) or inspect.isasyncgenfunction(value):
            return value
        held: Callable[..., Any] = self._while_it_lasts(value) if inspect.iscoroutinefunction(value) else self._unless_over(value)
        self.__dict__[name] = held  # found there from now on
        return held

    def _unless_over(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **named: None if self._over.is_set() else call(*arguments, **named)

    def _while_it_lasts(self, call: Callable[..., Coroutine[Any, Any, Result]]) -> Callable[..., Coroutine[Any, Any, Result]]:
        @wraps(call)
        async def held(*arguments: Any, **named: Any) -> Result:
            if not self._over.is_set():
                result = await call(*arguments, **named)
                if not self._over.is_set():
                    return result
            await asyncio.get_running_loop().create_future()
            raise AssertionError  # nobody answers

        return held
