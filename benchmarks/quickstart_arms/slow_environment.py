"""The guess game with a tool that takes its time: before each answer, a lognormal wait of mean .3 s."""

import asyncio
import math
import random

from headway import Outcome, Policy, Prompt

MEAN_SECONDS = 0.3
SIGMA = 1.0
TURNS = 4


def prompts() -> list[dict[str, str]]:
    """One prompt per hidden digit."""
    return [{"id": f"digit-{digit}", "hidden": str(digit)} for digit in range(10)]


def tool_seconds() -> float:
    """Draw from a lognormal distribution of mean MEAN_SECONDS."""
    return random.lognormvariate(math.log(MEAN_SECONDS) - SIGMA**2 / 2, SIGMA)


async def attempt(prompt: Prompt, policy: Policy) -> Outcome:
    """Play one game, with a slow tool between the turns."""
    hidden = prompt.fields["hidden"]
    game = await policy.open("<bos>?")
    for turn in range(TURNS):
        guess = (await game.generate(max_tokens=1)).text
        await asyncio.sleep(tool_seconds())
        if guess == hidden:
            return Outcome(reward=1.0, finish="stop", metadata={"guesses": turn + 1})
        game.observe("!" if guess not in "0123456789" or len(guess) != 1 else "<" if hidden < guess else ">")
    return Outcome(reward=0.0, finish="stop", metadata={"guesses": TURNS})
