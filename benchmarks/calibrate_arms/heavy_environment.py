"""The guess game with a tool whose time has a heavy tail: before each answer, a Pareto wait of mean .3 s, one in a thousand above 4.7 s."""

import asyncio
import random

from headway import Outcome, Policy, Prompt

MEAN_SECONDS = 0.3
SHAPE = 2.0
TURNS = 4


def prompts() -> list[dict[str, str]]:
    """One prompt per hidden digit."""
    return [{"id": f"digit-{digit}", "hidden": str(digit)} for digit in range(10)]


def tool_seconds() -> float:
    """Draw from a Pareto distribution of mean MEAN_SECONDS: its variance is infinite."""
    return MEAN_SECONDS * (SHAPE - 1) / SHAPE * random.paretovariate(SHAPE)


async def attempt(prompt: Prompt, policy: Policy) -> Outcome:
    """Play one game; between two turns the tool takes its time."""
    hidden = prompt.fields["hidden"]
    game = await policy.open("<bos>?")
    for turn in range(TURNS):
        guess = (await game.generate(max_tokens=1)).text
        if guess == hidden:
            return Outcome(reward=1.0, finish="stop", metadata={"guesses": turn + 1})
        await asyncio.sleep(tool_seconds())
        game.observe("!" if guess not in "0123456789" or len(guess) != 1 else "<" if hidden < guess else ">")
    return Outcome(reward=0.0, finish="stop", metadata={"guesses": TURNS})
