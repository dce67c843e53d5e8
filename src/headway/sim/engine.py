"""A simulated inference engine: it knows which version it served at every instant, and serves none while weights are synced.

Its *generation clock* runs with the loop's, and stands still between prepare and commit: what a rollout needs of it is what the rollout
takes. The history of versions is kept along that clock, so a worker can stamp every token with the weights that wrote it. Every token
is counted when it is written, whatever becomes of its rollout.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Literal

from headway.errors import EngineFailed, EngineUnreachable
from headway.types import Checkpoint, EngineKind

Stage = Literal["prepare", "transfer", "commit"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine behaves: seconds per stage of a weight sync, and what goes wrong.

    `pauses`: no token is written from prepare to commit. `fails`: stages that fail, each once, by version. `hangs`: stages that never
    end, each once, by version. `dies_at`: when it dies; `back_at`: when it is started anew, with other weights ("default").
    `named`: the spans of time (from, until) in which the watched list of engines names it; None: the config does, all the time.
    """

    prepare_seconds: float = 0.0
    transfer_seconds: float = 0.0
    commit_seconds: float = 0.0
    pauses: bool = True
    fails: frozenset[tuple[Stage, int]] = frozenset()
    hangs: frozenset[tuple[Stage, int]] = frozenset()
    dies_at: float = inf
    back_at: float = inf
    named: tuple[tuple[float, float], ...] | None = None


class SimEngine:
    """`protocols.Engine` in memory. `label`: what it says it serves at first; any label that is not "<lineage>-<n>" means version 0."""

    def __init__(self, name: str, settings: EngineSettings = EngineSettings(), *, label: str = "default") -> None:
        self._name = name
        self._settings = settings
        self._label = label
        self._fails = set(settings.fails)
        self._hangs = set(settings.hangs)
        self._was_back = False
        self._since = [0.0]  # on the generation clock: _versions[i] is served from _since[i] on
        self._versions = [_version(label)]
        self._paused_since: float | None = None
        self._paused_seconds = 0.0
        self._serving = asyncio.Event()
        self._serving.set()
        self._turns: dict[int, tuple[float, float, int]] = {}  # under way: start and seconds on the generation clock, tokens
        self._begun = 0
        self._sampled = 0  # of turns that have ended
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
        return self._versions[-1]

    @property
    def dies_at(self) -> float:
        """The virtual time at which it dies or died, as long as it is not back; infinite: never."""
        return inf if asyncio.get_running_loop().time() >= self._settings.back_at else self._settings.dies_at

    @property
    def paused(self) -> bool:
        """Whether a weight sync holds generation up."""
        return self._paused_since is not None

    def clock(self) -> float:
        """Return the generation clock, in seconds; however sums round, never before the version that is served."""
        now = asyncio.get_running_loop().time() if self._paused_since is None else self._paused_since
        return max(now - self._paused_seconds, self._since[-1])

    async def serving(self) -> None:
        """Wait until generation goes on."""
        await self._serving.wait()

    @contextmanager
    def sampling(self, seconds: float, tokens: int) -> Iterator[None]:
        """Count the tokens of a turn, spread evenly over `seconds` of the generation clock, until it ends or is cut short."""
        number = self._begun = self._begun + 1
        self._turns[number] = (self.clock(), seconds, tokens)
        try:
            yield
        finally:
            self._sampled += self._written(*self._turns.pop(number))

    def _written(self, start: float, seconds: float, tokens: int) -> int:
        elapsed = self.clock() - start
        return tokens if elapsed >= seconds - 1e-9 else int(tokens * elapsed / seconds)

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
        return self._sampled + sum(self._written(*turn) for turn in self._turns.values())

    def stamps(self, start: float, seconds: float, tokens: int) -> list[tuple[int, int]]:
        """Return the version spans, as (first token, version), of tokens spread evenly over a stretch of the generation clock.

        Token i is written at `start + seconds * i / tokens`: by the weights served then.
        """
        first = bisect_right(self._since, start) - 1
        spans = [(0, self._versions[first])]
        for since, version in zip(self._since[first + 1 :], self._versions[first + 1 :], strict=True):
            token = -int(-(since - start) * tokens // seconds) if seconds else tokens
            if token >= tokens:
                break
            if token == spans[-1][0]:
                spans.pop()
            spans.append((token, version))
        return spans

    async def label(self) -> str:
        """Return the version label that is served."""
        self._alive()
        return self._label

    async def prepare(self, checkpoint: Checkpoint) -> None:
        """Hold generation up, if the settings say so."""
        if self._settings.pauses and self._paused_since is None:
            self._paused_since = asyncio.get_running_loop().time()
            self._serving.clear()
        await self._stage("prepare", checkpoint, self._settings.prepare_seconds)

    async def transfer(self, checkpoint: Checkpoint) -> None:
        """Take the weights' time."""
        await self._stage("transfer", checkpoint, self._settings.transfer_seconds)

    async def commit(self, checkpoint: Checkpoint) -> None:
        """Serve the new version from now on."""
        await self._stage("commit", checkpoint, self._settings.commit_seconds)
        self._label = checkpoint.label
        self._resume()  # before the clock is read: a running one rounds otherwise than a held one
        self._since.append(self.clock())
        self._versions.append(checkpoint.version)

    async def sleep(self) -> None:
        """Refuse: a simulated engine holds no memory."""
        raise EngineFailed(f"{self._name} cannot sleep")

    async def wake(self) -> None:
        """Refuse, as `sleep`."""
        raise EngineFailed(f"{self._name} cannot sleep")

    async def abandon(self) -> None:
        """Go on with the old weights."""
        self._resume()

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

    def _resume(self) -> None:
        if self._paused_since is not None:
            self._paused_seconds += asyncio.get_running_loop().time() - self._paused_since
            self._paused_since = None
            self._serving.set()

    def _alive(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._settings.back_at:
            if not self._was_back:
                self._was_back = True
                self._label = "default"
                self._resume()
        elif now >= self._settings.dies_at:
            raise EngineUnreachable(f"{self._name} died at {self._settings.dies_at:g} s, as the simulation's settings say")


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
