"""What rollouts are like, and what an attempt at one will be: drawn by keys, so that two schedules of one world run the same rollouts.

An attempt's draws depend on (seed, purpose, prompt, epoch, how often the prompt was requeued, member, attempt) and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.sim.chance import Draws
from headway.sim.distributions import NO_TIME, ONE_SECOND, Distribution, Fixed
from headway.types import AttemptRequest, Cause, Prompt

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
    `scored_apart`: attempts leave the reward to the scorer, which takes `score_seconds` a call; `scored_together`: the same for all members
    of a group. `prompt_tokens`: a distribution gives those of each prompt. `payload`: encode real samples (random
    ids); without, `Rollout.payload` is empty.
    """

    seconds: Distribution | Seconds = ONE_SECOND
    tokens_per_second: float = 100.0
    prompt_tokens: int | Distribution = 16
    turns: int = 1
    tool_seconds: Distribution = NO_TIME
    observed_tokens: int = 8
    faults: tuple[Fault, ...] = ()
    reward: float | Reward = 0.5
    scored_apart: bool = False
    score_seconds: Distribution = NO_TIME
    scored_together: bool = False
    payload: bool = False


class Turn(NamedTuple):
    """A turn as planned, seconds on the generation clock; and the environment's time after it."""

    tokens: int
    seconds: float
    tool_seconds: float


class Chances:
    """Draws what the settings say, for one world."""

    def __init__(self, settings: RolloutSettings, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        given = settings.prompt_tokens
        self._prompt_tokens = round(given.value) if isinstance(given, Fixed) else given  # which draws nothing

    def of(self, request: AttemptRequest) -> Draws:
        """Return what an attempt draws from."""
        prompt = request.prompt
        tries = f"\0try {prompt.tries}" if prompt.tries else ""
        return Draws(f"{self._seed}\0{request.purpose}\0{prompt.id}\0{prompt.epoch}{tries}\0{request.member}\0{request.attempt}")

    def fault(self, draws: Draws) -> Fault | None:
        """Return how an attempt will fail; None: it will not."""
        if self._settings.faults:
            drawn = draws.random()
            for fault in self._settings.faults:
                drawn -= fault.probability
                if drawn < 0:
                    return fault
        return None

    def turns(self, request: AttemptRequest, draws: Draws) -> list[Turn]:
        """Return the turns of an attempt."""
        settings = self._settings
        distribution = settings.seconds(request.prompt, request.member) if callable(settings.seconds) else settings.seconds
        seconds, turns = distribution.sample(draws), settings.turns
        tokens = max(turns, round(min(seconds, 1e9) * settings.tokens_per_second))
        if turns == 1:
            return [Turn(tokens, seconds, 0.0)]
        shares = [tokens * (turn + 1) // turns - tokens * turn // turns for turn in range(turns)]  # as even as whole numbers are
        tools = [*(settings.tool_seconds.sample(draws) for _ in range(turns - 1)), 0.0]
        return [Turn(share, seconds / turns, tool) for share, tool in zip(shares, tools, strict=True)]

    def prompt_tokens(self, prompt: Prompt) -> int:
        """Return how many tokens a prompt has."""
        given = self._prompt_tokens
        return given if isinstance(given, int) else round(given.sample(Draws(self._seed, "prompt tokens", prompt.id, prompt.epoch)))

    def reward(self, prompt: Prompt, member: int, draws: Draws) -> float | None:
        """Return the reward of a rollout; None: it is the scorer's to say."""
        reward, drawn = self._settings.reward, draws.random()
        return float(drawn < reward) if isinstance(reward, int | float) else reward(prompt, member, drawn)

    def scores(self, prompt: Prompt, members: Sequence[int]) -> tuple[float, list[float | None]]:
        """Return how long a scorer takes for these members of a group, and what it says of each."""
        settings = self._settings
        draws = [Draws(self._seed, "score", prompt.id, prompt.epoch, member) for member in members]
        if settings.scored_together:
            seconds = settings.score_seconds.sample(Draws(self._seed, "scorer", prompt.id, prompt.epoch))
        else:
            seconds = max((settings.score_seconds.sample(drawn) for drawn in draws), default=0.0)
        return seconds, [self.reward(prompt, member, drawn) for member, drawn in zip(members, draws, strict=True)]
