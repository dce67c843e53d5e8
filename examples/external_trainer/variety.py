"""Something to generate while the trainer next door is exercised: eight tokens, rewarded for variety."""

from headway import Generation, Prompt, single_turn


def prompts() -> list[dict[str, str]]:
    """Ten ways to begin."""
    return [{"id": start, "prompt": f"<bos>{start}"} for start in "abcdefghij"]


def variety(prompt: Prompt, completion: Generation) -> float:
    """Return how many different characters, the prompt's own left out, there are to a token."""
    return len(set(completion.text) - {prompt.id}) / len(completion.token_ids)


attempt = single_turn(variety)
