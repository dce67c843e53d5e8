"""A simulated rollout worker: attempts take drawn time on an engine, and end in a stamped rollout or a drawn failure.

What an attempt will be is drawn by `sim.rollouts`. Its tokens are spread evenly over its turns, and stamped by the engine that wrote the
turn: one whose engine dies is written again at the engine where the rollout goes on. Between two turns an engine keeps what it has of the
context, until it is given weights again. The header's `metadata["spans"]` holds the stamps as (first sampled token, version) pairs, which
spares `SimBatchStore` the payload.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from math import inf, isfinite

import numpy as np

from headway.formats.rollout import encode_samples
from headway.protocols import Mover
from headway.sim.engine import SimEngine, join_stamps
from headway.sim.generation import Spans, Writing
from headway.sim.rollouts import Chances, Fault, Reward, RolloutSettings, Seconds, Turn
from headway.types import AttemptRequest, EngineAddress, Failure, Rollout, Sample, Score, ScoreRequest

__all__ = ["Fault", "Reward", "RolloutSettings", "Seconds", "SimWorker"]


class SimWorker:
    """`protocols.Worker` in memory; counts what runs, now (`in_flight`), at most (`peak`) and in all (`attempts`), and `moves`.

    `undelivered`: (time, tokens) of attempts that ended and had sampled more than they said; `eval_delivered`: tokens that attempts for
    evaluations said. Once it is stopped, `in_progress` has the tokens of the attempts that were under way.
    """

    def __init__(self, settings: RolloutSettings, engines: Iterable[SimEngine], *, seed: int = 0) -> None:
        self._settings = settings
        self._engines = {address: engine for engine in engines for address in (engine.name, engine.url)}
        self._seed = seed
        self._chances = Chances(settings, seed)
        self._under_way: dict[_Attempt, None] = {}
        self._stopped = False
        self.in_flight = self.peak = self.attempts = self.moves = 0
        self.in_progress = self.eval_delivered = 0
        self.undelivered: list[tuple[float, int]] = []
        self.closed = False

    async def attempt(self, request: AttemptRequest, move: Mover | None = None) -> Rollout | Failure:
        """Take the attempt's time and return how it ended."""
        attempt = _Attempt(self._engines, request, move)
        self._under_way[attempt] = None
        self.attempts += 1
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        delivered = 0
        try:
            result = await self._attempt(attempt)
            delivered = result.sampled_tokens
            return result
        finally:
            attempt.engine.generation.hosts(-1)
            del self._under_way[attempt]
            self.in_flight -= 1
            self.moves += attempt.moves
            if not self._stopped:
                if attempt.sampled != delivered:
                    self.undelivered.append((asyncio.get_running_loop().time(), attempt.sampled - delivered))
                self.eval_delivered += delivered if request.purpose == "eval" else 0

    async def score(self, request: ScoreRequest) -> Sequence[Score] | Failure:
        """Take the scorer's time and score each rollout by the reward of the settings."""
        seconds, rewards = self._chances.scores(request.prompt, [rollout.member for rollout in request.rollouts])
        await asyncio.sleep(seconds)
        return [Score(reward) for reward in rewards]

    def stop(self) -> None:
        """Take down what is in progress; what happens to it later counts for nothing."""
        self._stopped = True
        self.in_progress = sum(attempt.sampled for attempt in self._under_way)

    async def close(self) -> None:
        """Be closed."""
        self.closed = True

    async def _attempt(self, attempt: _Attempt) -> Rollout | Failure:
        started, request = asyncio.get_running_loop().time(), attempt.request
        draws = self._chances.of(request)
        fault = self._chances.fault(draws)
        turns = self._chances.turns(request, draws)
        attempt.context = self._chances.prompt_tokens(request.prompt)
        left = draws.random() * sum(turn.seconds + turn.tool_seconds for turn in turns) if fault else inf
        for turn in turns:
            if not await attempt.write(turn, left):
                return Failure("engine_error", f"{attempt.engine.name} died", retryable=True, sampled_tokens=attempt.delivered)
            if turn.seconds >= left:
                break
            left -= turn.seconds
            if turn.tool_seconds:
                await asyncio.sleep(min(turn.tool_seconds, left))
                left -= turn.tool_seconds
            attempt.context += self._settings.observed_tokens
            if left <= 0:
                break
        if fault:
            return Failure(fault.cause, "as the simulation's settings say", fault.retryable, attempt.delivered)
        reward = None if self._settings.scored_apart else self._chances.reward(request.prompt, request.member, draws)
        if reward is not None and not isfinite(reward):
            return Failure("bad_reward", f"the reward is {reward}", retryable=False, sampled_tokens=attempt.delivered)
        return self._rollout(attempt, reward, started, turns, join_stamps(attempt.stamps))

    def _rollout(self, attempt: _Attempt, reward: float | None, started: float, turns: list[Turn], spans: Spans) -> Rollout:
        settings, request = self._settings, attempt.request
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
            engine=attempt.engine.name,
            metadata={"spans": spans},
            samples=1,
            tokens=attempt.context - settings.observed_tokens,  # nobody answers the last turn
            sampled_tokens=attempt.delivered,
            head=min(versions),
            tail=max(versions),
            payload=self._payload(request, turns, spans) if settings.payload else b"",
        )

    def _payload(self, request: AttemptRequest, turns: list[Turn], spans: Spans) -> bytes:
        settings = self._settings
        mask = [np.zeros(self._chances.prompt_tokens(request.prompt), np.bool_)]
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


class _Attempt:
    """An attempt under way: where, what has come of it (`stamps` of its turns, with their tokens), and the `context` of the next turn."""

    __slots__ = (
        *("context", "delivered", "engine", "moves", "request", "stamps"),
        *("_cached", "_cached_at", "_cached_with", "_engines", "_lost", "_move", "_writing"),
    )

    def __init__(self, engines: dict[str, SimEngine], request: AttemptRequest, move: Mover | None) -> None:
        self.request = request
        self.engine = engines[request.engine]
        self.engine.generation.hosts(1)
        self.context = 0
        self.stamps: list[tuple[int, Spans]] = []
        self.delivered = self.moves = 0  # tokens of whole turns
        self._engines = engines
        self._move = move
        self._lost = 0  # tokens of turns that were not
        self._writing: Writing | None = None
        self._cached = 0  # tokens of context that an engine has still:
        self._cached_at: SimEngine | None = None  # which,
        self._cached_with = 0  # and how often it had been given weights

    @property
    def sampled(self) -> int:
        """Tokens that were sampled for it, delivered or not."""
        return self.delivered + self._lost + (0 if self._writing is None else self.engine.generation.written(self._writing))

    async def write(self, turn: Turn, left: float) -> bool:
        """Write a turn, or its first `left` seconds at full speed; False: the engine died, and there is no other to go on at."""
        until = min(turn.seconds, left)
        spans: Spans | None = None
        while spans is None:
            writing = self._writing = Writing(turn.tokens, turn.seconds, until, self.context, self._cached_here() if self._cached else 0)
            try:
                spans = await self.engine.generation.write(writing)
            finally:
                self._writing = None
                self._lost += writing.ended_with
            if spans is None and not await self._moved():
                return False
        if turn.seconds >= left:
            return True
        self.stamps.append((turn.tokens, spans))
        self._lost -= turn.tokens
        self.delivered += turn.tokens
        self.context += turn.tokens
        self._cached, self._cached_at, self._cached_with = self.context, self.engine, len(self.engine.served_at)
        return True

    def _cached_here(self) -> int:
        return self._cached if self._cached_at is self.engine and self._cached_with == len(self.engine.served_at) else 0

    async def _moved(self) -> bool:
        """Go to another engine; False: there is none."""
        elsewhere = None if self._move is None else await self._move(EngineAddress(self.engine.url))
        if elsewhere is None:
            return False
        self.moves += 1
        self.engine.generation.hosts(-1)
        self.engine = self._engines[elsewhere.url]
        self.engine.generation.hosts(1)
        return True
