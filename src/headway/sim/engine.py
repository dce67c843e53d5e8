"""A simulated inference engine: weight syncs, and what goes wrong. How it writes is the matter of `sim.generation` and `sim.load`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from headway.errors import EngineFailed, EngineUnreachable
from headway.sim.chance import Draws
from headway.sim.distributions import Distribution
from headway.sim.fixed_speed import FixedSpeed
from headway.sim.generation import Generation, Spans
from headway.sim.load import LoadSettings
from headway.sim.loaded import Loaded
from headway.types import Checkpoint, EngineKind

Stage = Literal["prepare", "transfer", "commit"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine behaves: seconds per stage of a weight sync, and what goes wrong.

    `pauses`: no token is written from prepare to commit. `fails`: stages that fail, each once, by version. `hangs`: stages that never
    end, each once, by version. `dies_at`: when it dies; `back_at`: when it is started anew, with other weights ("default").
    `deaths`: instead, any number of such pairs, ascending.
    `named`: the spans of time (from, until) in which the watched list of engines names it; None: the config does, all the time. `load`:
    sequences share it; None: a turn takes its time, however many there are. `seed`: of what is drawn.
    """

    prepare_seconds: float = 0.0
    transfer_seconds: float | Distribution = 0.0
    commit_seconds: float = 0.0
    pauses: bool = True
    fails: frozenset[tuple[Stage, int]] = frozenset()
    hangs: frozenset[tuple[Stage, int]] = frozenset()
    dies_at: float = inf
    back_at: float = inf
    deaths: tuple[tuple[float, float], ...] = ()
    named: tuple[tuple[float, float], ...] | None = None
    load: LoadSettings | None = None
    seed: int = 0

    @property
    def all_deaths(self) -> tuple[tuple[float, float], ...]:
        """When it dies and is back, in pairs."""
        return self.deaths or (((self.dies_at, self.back_at),) if self.dies_at < inf else ())


class SimEngine:
    """`protocols.Engine` in memory. `label`: what it says it serves at first; any label that is not "<lineage>-<n>" means version 0."""

    def __init__(self, name: str, settings: EngineSettings = EngineSettings(), *, label: str = "default") -> None:
        self._name = name
        self._settings = settings
        self._label = label
        self._fails = set(settings.fails)
        self._hangs = set(settings.hangs)
        self._returns = 0  # how often it was back
        self.deaths = settings.all_deaths
        self.generation = self._new_generation(_version(label))
        self.served_at: list[float] = []  # when it was given weights
        self.closed = False

    @property
    def name(self) -> str:
        """A short name, unique in the world."""
        return self._name

    @property
    def url(self) -> str:
        """The address by which `SimWorker` knows it."""
        return f"sim://{self._name}"

    @property
    def kind(self) -> EngineKind:
        """What `SimWorker` does not look at."""
        return "vllm"

    @property
    def named(self) -> tuple[tuple[float, float], ...] | None:
        """When the watched list names it, as the settings say."""
        return self._settings.named

    @property
    def version(self) -> int:
        """The version that is served now."""
        return self.generation.version

    @property
    def paused(self) -> bool:
        """Whether a weight sync holds generation up."""
        return self.generation.paused

    @property
    def dies_at(self) -> float:
        """The virtual time at which it dies or died, as long as it is not back; infinite: never."""
        return self.generation.dies_at

    def clock(self) -> float:
        """Return the clock of its generation."""
        return self.generation.clock()

    def stamps(self, start: float, length: float, tokens: int) -> Spans:
        """Return the version spans of tokens spread evenly over a stretch of that clock."""
        return self.generation.stamps(start, length, tokens)

    async def software(self) -> str:
        """Return what it is."""
        return "simulated"

    async def sampled_tokens(self) -> int:
        """Return how many tokens have been written, those of turns under way included."""
        self._alive()
        return self.sampled

    @property
    def sampled(self) -> int:
        """The same, dead or alive."""
        return self.generation.sampled

    async def label(self) -> str:
        """Return the version label that is served."""
        self._alive()
        return self._label

    async def prepare(self, checkpoint: Checkpoint) -> None:
        """Hold generation up, if the settings say so."""
        if self._settings.pauses:
            self.generation.pause()
        await self._stage("prepare", checkpoint, self._settings.prepare_seconds)

    async def transfer(self, checkpoint: Checkpoint) -> None:
        """Take the weights' time."""
        seconds = self._settings.transfer_seconds
        if not isinstance(seconds, int | float):
            seconds = seconds.sample(Draws(self._settings.seed, "sync", self._name, checkpoint.version))
        await self._stage("transfer", checkpoint, seconds)

    async def commit(self, checkpoint: Checkpoint) -> None:
        """Serve the new version from now on."""
        await self._stage("commit", checkpoint, self._settings.commit_seconds)
        self._label = checkpoint.label
        self.generation.resume()  # before the clock is read: a running one rounds otherwise than a held one
        self.generation.serve(checkpoint.version)
        self.served_at.append(asyncio.get_running_loop().time())

    async def sleep(self) -> None:
        """Refuse: a simulated engine holds no memory."""
        raise EngineFailed(f"{self._name} cannot sleep")

    async def wake(self) -> None:
        """Refuse, as `sleep`."""
        raise EngineFailed(f"{self._name} cannot sleep")

    async def abandon(self) -> None:
        """Go on with the old weights."""
        self.generation.resume()

    async def close(self) -> None:
        """Be closed."""
        self.closed = True

    async def _stage(self, stage: Stage, checkpoint: Checkpoint, seconds: float) -> None:
        self._alive()
        if (stage, checkpoint.version) in self._hangs:
            self._hangs.discard((stage, checkpoint.version))
            await asyncio.get_running_loop().create_future()
        if seconds:
            await asyncio.sleep(seconds)
            self._alive()
        if (stage, checkpoint.version) in self._fails:
            self._fails.discard((stage, checkpoint.version))
            raise EngineFailed(f"{self._name}: {stage} of {checkpoint.label} failed, as the simulation's settings say")

    def _new_generation(self, version: int) -> Generation:
        load = self._settings.load
        return FixedSpeed(version, self.deaths) if load is None else Loaded(version, load, self.deaths)

    def _alive(self) -> None:
        now = asyncio.get_running_loop().time()
        returns = sum(now >= back for _, back in self.deaths)
        if returns > self._returns:
            self._returns = returns
            self._label = "default"
            self.generation.resume()
        for dies, back in self.deaths:
            if dies <= now < back:
                raise EngineUnreachable(f"{self._name} died at {dies:g} s, as the simulation's settings say")


def join_stamps(parts: Sequence[tuple[int, list[tuple[int, int]]]]) -> list[tuple[int, int]]:
    """Join the spans of successive turns, each (tokens, spans), into the spans of the whole."""
    joined: list[tuple[int, int]] = []
    before = 0
    for tokens, spans in parts:
        for first, version in spans:
            if not joined or joined[-1][1] != version:
                joined.append((before + first, version))
        before += tokens
    return joined


def _version(label: str) -> int:
    tail = label.rpartition("-")[2]
    return int(tail) if tail.isdecimal() else 0
