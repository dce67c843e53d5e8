"""Guess a hidden digit in four turns: after each guess the environment says whether the digit is lower or higher.

The shortest multi-turn environment there is: one token per turn, one character of feedback, a reward at the end.
"""

from headway import Outcome, Policy, Prompt

TURNS = 4


def prompts() -> list[dict[str, str]]:
    """One prompt per hidden digit."""
    return [{"id": f"digit-{digit}", "hidden": str(digit)} for digit in range(10)]


async def attempt(prompt: Prompt, policy: Policy) -> Outcome:
    """Play one game: reward 1 for finding the hidden digit, 0 otherwise."""
    hidden = prompt.fields["hidden"]
    game = await policy.open("<bos>?")
    for turn in range(TURNS):
        guess = (await game.generate(max_tokens=1)).text
        if guess == hidden:
            return Outcome(reward=1.0, finish="stop", metadata={"guesses": turn + 1})
        game.observe(feedback(guess, hidden))
    return Outcome(reward=0.0, finish="stop", metadata={"guesses": TURNS})


def feedback(guess: str, hidden: str) -> str:
    """`<`: the hidden digit is lower, `>`: it is higher, `!`: that was no digit."""
    if len(guess) != 1 or guess not in "0123456789":
        return "!"
    return "<" if hidden < guess else ">"
