"""Copy three digits and stop: the single-turn twin of guess, made of nothing but a reward function."""

from itertools import permutations

from headway import Generation, Prompt, single_turn


def prompts() -> list[dict[str, str]]:
    """Every sequence of three different digits: `<bos>407=` asks for `407` and the end token."""
    return [{"id": digits, "prompt": f"<bos>{digits}=", "answer": digits} for digits in map("".join, permutations("0123456789", 3))]


def reward(prompt: Prompt, completion: Generation) -> float:
    """Return the share of the answer's four tokens, the end token included, that is right from the start."""
    answer = prompt.fields["answer"]
    right = next((i for i, digit in enumerate(answer) if completion.text[i : i + 1] != digit), len(answer))
    ended = completion.finish == "stop" and completion.text == answer
    return (right + ended) / 4


attempt = single_turn(reward)
