"""A simulated rollout worker: attempts take drawn time on an engine, and end in a stamped rollout or a drawn failure.

What an attempt draws depends on (seed, purpose, prompt, epoch, how often the prompt was requeued, member, attempt) and nothing else, so
that two schedules of one world run the same rollouts. Tokens are spread evenly over the generation time, turn by turn, and stamped by the
engine that wrote the turn: one whose engine dies is written again at the engine where the rollout goes on. The header's
`metadata["spans"]` holds the stamps as (first sampled token, version) pairs, which spares `SimBatchStore` the payload.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from headway.formats.rollout import encode_samples
from headway.protocols import Mover
from headway.sim.chance import Draws
from headway.sim.distributions import NO_TIME, ONE_SECOND, Distribution
from headway.sim.engine import SimEngine, join_stamps
from headway.types import AttemptRequest, Cause, EngineAddress, Failure, Prompt, Rollout, Sample, Score, ScoreRequest

Seconds = Callable[[Prompt, int], Distribution]
"""(prompt, member) -> how long its attempts take, where some are slower than others."""

Reward = Callable[[Prompt, int, float], float | None]
"""(prompt, member, uniform number of the attempt) -> reward; None asks for a scorer, NaN loses the member as `bad_reward`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A way in which attempts fail, and how probable it is; the time of failure is uniform over the attempt."""

    cause: Cause
    probability: float
    retryable: bool = True


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What rollouts are like.

    `seconds`: generation time of an attempt, shared evenly by its turns; infinite: it hangs. A distribution, or a function that gives one.
    `tool_seconds`: the environment's time between two turns. `reward`: a function, or the probability of a 1 (otherwise 0).
    `scored_apart`: attempts leave the reward to the scorer, which takes `score_seconds` a call. `payload`: encode real samples (random
    ids); without, `Rollout.payload` is empty.
    """

    seconds: Distribution | Seconds = ONE_SECOND
    tokens_per_second: float = 100.0
    prompt_tokens: int = 16
    turns: int = 1
    tool_seconds: Distribution = NO_TIME
    observed_tokens: int = 8
    faults: tuple[Fault, ...] = ()
    reward: float | Reward = 0.5
    scored_apart: bool = False
    score_seconds: Distribution = NO_TIME
    payload: bool = False


class _Turn(NamedTuple):
    """A turn as planned, seconds on the generation clock; and the environment's time after it."""

    tokens: int
    seconds: float
    tool_seconds: float


class SimWorker:
    """`protocols.Worker` in memory; counts what runs, now (`in_flight`), at most (`peak`) and in all (`attempts`), and `moves`."""

    def __init__(self, settings: RolloutSettings, engines: Iterable[SimEngine], *, seed: int = 0) -> None:
        self._settings = settings
        self._engines = {address: engine for engine in engines for address in (engine.name, engine.url)}
        self._seed = seed
        self.in_flight = self.peak = self.attempts = self.moves = 0
        self.closed = False

    async def attempt(self, request: AttemptRequest, move: Mover | None = None) -> Rollout | Failure:
        """Take the attempt's time and return how it ended."""
        self.attempts += 1
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            return await self._attempt(request, Draws(self._seed, *_key(request)), move)
        finally:
            self.in_flight -= 1

    async def score(self, request: ScoreRequest) -> Sequence[Score] | Failure:
        """Take the scorer's time and score each rollout by the reward of the settings."""
        draws = [Draws(self._seed, "score", rollout.prompt_id, request.prompt.epoch, rollout.member) for rollout in request.rollouts]
        await asyncio.sleep(max((self._settings.score_seconds.sample(drawn) for drawn in draws), default=0.0))
        return [Score(self._reward(request.prompt, rollout.member, drawn)) for rollout, drawn in zip(request.rollouts, draws, strict=True)]

    async def close(self) -> None:
        """Be closed."""
        self.closed = True

    async def _attempt(self, request: AttemptRequest, draws: Draws, move: Mover | None) -> Rollout | Failure:
        engine = self._engines[request.engine]
        started = asyncio.get_running_loop().time()
        fault = self._fault(draws)
        turns = self._plan(request, draws)
        stamps: list[tuple[int, list[tuple[int, int]]]] = []
        left = draws.random() * sum(turn.seconds + turn.tool_seconds for turn in turns) if fault else inf
        for turn in turns:
            start = engine.clock()
            while not await _generate(engine, turn, min(turn.seconds, left)):
                elsewhere = None if move is None else await move(EngineAddress(engine.url))
                if elsewhere is None:
                    sampled = sum(tokens for tokens, _ in stamps)
                    return Failure("engine_error", f"{engine.name} died", retryable=True, sampled_tokens=sampled)
                self.moves += 1
                engine = self._engines[elsewhere.url]
                start = engine.clock()
            if turn.seconds >= left:
                break
            stamps.append((turn.tokens, engine.stamps(start, turn.seconds, turn.tokens)))
            left -= turn.seconds
            if turn.tool_seconds:
                await asyncio.sleep(min(turn.tool_seconds, left))
                left -= turn.tool_seconds
            if left <= 0:
                break
        sampled = sum(tokens for tokens, _ in stamps)
        if fault:
            return Failure(fault.cause, "as the simulation's settings say", fault.retryable, sampled)
        reward = None if self._settings.scored_apart else self._reward(request.prompt, request.member, draws)
        if reward is not None and not isfinite(reward):
            return Failure("bad_reward", f"the reward is {reward}", retryable=False, sampled_tokens=sampled)
        return self._rollout(request, reward, engine, started, turns, join_stamps(stamps))

    def _plan(self, request: AttemptRequest, draws: Draws) -> list[_Turn]:
        settings = self._settings
        distribution = settings.seconds(request.prompt, request.member) if callable(settings.seconds) else settings.seconds
        seconds = distribution.sample(draws) / settings.turns
        tokens = max(1, round(min(seconds, 1e9) * settings.tokens_per_second))
        if settings.turns == 1:
            return [_Turn(tokens, seconds, 0.0)]
        between = [_Turn(tokens, seconds, settings.tool_seconds.sample(draws)) for _ in range(settings.turns - 1)]
        return [*between, _Turn(tokens, seconds, 0.0)]

    def _fault(self, draws: Draws) -> Fault | None:
        if self._settings.faults:
            drawn = draws.random()
            for fault in self._settings.faults:
                drawn -= fault.probability
                if drawn < 0:
                    return fault
        return None

    def _reward(self, prompt: Prompt, member: int, draws: Draws) -> float | None:
        reward, drawn = self._settings.reward, draws.random()
        return float(drawn < reward) if isinstance(reward, int | float) else reward(prompt, member, drawn)

    def _rollout(
        self,
        request: AttemptRequest,
        reward: float | None,
        engine: SimEngine,
        started: float,
        turns: list[_Turn],
        spans: list[tuple[int, int]],
    ) -> Rollout:
        settings = self._settings
        sampled = sum(turn.tokens for turn in turns)
        versions = [version for _, version in spans]
        return Rollout(
            group=request.group,
            member=request.member,
            attempt=request.attempt,
            prompt_id=request.prompt.id,
            environment="sim",
            reward=reward,
            rewards={},
            finish="stop",
            turns=len(turns),
            started=started,
            finished=asyncio.get_running_loop().time(),
            engine=engine.name,
            metadata={"spans": spans},
            samples=1,
            tokens=settings.prompt_tokens + sampled + settings.observed_tokens * (len(turns) - 1),
            sampled_tokens=sampled,
            head=min(versions),
            tail=max(versions),
            payload=self._payload(request, turns, spans) if settings.payload else b"",
        )

    def _payload(self, request: AttemptRequest, turns: list[_Turn], spans: list[tuple[int, int]]) -> bytes:
        settings = self._settings
        mask = [np.zeros(settings.prompt_tokens, np.bool_)]
        for turn in turns:
            mask += [np.ones(turn.tokens, np.bool_), np.zeros(settings.observed_tokens, np.bool_)]
        sampled = np.concatenate(mask[:-1])
        rng = np.random.default_rng([self._seed, request.seed])
        sample = Sample(
            token_ids=rng.integers(0, 1000, len(sampled), np.int32),
            sampled_mask=sampled,
            loss_mask=sampled,
            logprobs=np.where(sampled, -rng.random(len(sampled), np.float32), np.float32(0)),
            span_start=np.array([first for first, _ in spans], np.int32),
            span_version=np.array([version for _, version in spans], np.int32),
        )
        return encode_samples([sample])


async def _generate(engine: SimEngine, turn: _Turn, seconds: float) -> bool:
    """Write a turn, or its first `seconds` of the engine's generation clock; False: the engine died before."""
    loop = asyncio.get_running_loop()
    end = engine.clock() + seconds
    with engine.sampling(turn.seconds, turn.tokens):
        while True:
            if engine.paused:
                await engine.serving()
            if loop.time() >= engine.dies_at:
                return False
            wait = end - engine.clock()
            if wait <= 1e-9:  # what rounding leaves of a stretch that a sync has cut
                return True
            await asyncio.sleep(min(wait, engine.dies_at - loop.time()))


def _key(request: AttemptRequest) -> tuple[str | int, ...]:
    prompt = request.prompt
    tries = (f"try {prompt.tries}",) if prompt.tries else ()
    return (request.purpose, prompt.id, prompt.epoch, *tries, request.member, request.attempt)
