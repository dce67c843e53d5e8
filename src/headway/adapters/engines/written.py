"""What one generation has written so far, put together from the engine's answers. No I/O."""

from __future__ import annotations

from typing import Literal

from headway.adapters.engines.generation import Finish, Generated, GenerationFailed, Part

_NOTHING = Part([], [], [], "abort")


class Written:
    """`so_far`: all answers as one. `empty`: how many in a row were aborted without a token; `most_empty` of them are given up."""

    __slots__ = ("_most_empty", "empty", "so_far")

    def __init__(self, most_empty: int) -> None:
        self.so_far = _NOTHING
        self.empty = 0
        self._most_empty = most_empty

    def add(self, part: Part, url: str) -> Finish:
        """Append an answer of the engine at `url`; return how it ended. Raises `GenerationFailed` when nothing is to be hoped for."""
        if part.token_ids:
            self.empty = 0
            self.so_far = part if self.so_far is _NOTHING else _joined(self.so_far, part)
        elif part.finish == "abort":
            self.empty += 1
            if self.empty >= self._most_empty:
                said = f"{url} aborted a generation {self.empty} times in a row without a token"
                raise GenerationFailed(said, retryable=False, sampled_tokens=len(self.so_far.token_ids))
        elif self.so_far is _NOTHING:
            raise GenerationFailed(f"{url} ended a generation without a token", cause="empty_completion", retryable=False)
        return part.finish

    def whole(self, finish: Literal["stop", "length"]) -> Generated:
        """Return all of it."""
        return Generated(self.so_far.token_ids, self.so_far.logprobs, self.so_far.spans, finish)


def _joined(first: Part, more: Part) -> Part:
    """Return `first`, to which `more` is appended; neighbours of one version are one span."""
    spans = first.spans
    for start, version in more.spans:
        if spans[-1][1] != version:
            spans.append((start + len(first.token_ids), version))
    first.token_ids.extend(more.token_ids)
    first.logprobs.extend(more.logprobs)
    return first
