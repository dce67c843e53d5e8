"""What one generation has written so far, put together from the engine's answers. No I/O."""

from __future__ import annotations

from typing import Literal

from headway.adapters.engines.generation import Finish, Generated, GenerationFailed, Part


class Written:
    """`token_ids`: so far. `empty`: how many answers in a row were aborted without a token; `most_empty` are given up."""

    __slots__ = ("_logprobs", "_most_empty", "_spans", "empty", "token_ids")

    def __init__(self, most_empty: int) -> None:
        self.token_ids: list[int] = []
        self.empty = 0
        self._most_empty = most_empty
        self._logprobs: list[float] = []
        self._spans: list[tuple[int, int]] = []

    def add(self, part: Part, url: str) -> Finish:
        """Append an answer of the engine at `url`; return how it ended. Raises `GenerationFailed` when nothing is to be hoped for."""
        if part.token_ids:
            self._append(part)
        elif part.finish == "abort":
            self.empty += 1
            if self.empty >= self._most_empty:
                said = f"{url} aborted a generation {self.empty} times in a row without a token"
                raise GenerationFailed(said, retryable=False, sampled_tokens=len(self.token_ids))
        elif not self.token_ids:
            raise GenerationFailed(f"{url} ended a generation without a token", cause="empty_completion", retryable=False)
        return part.finish

    def whole(self, finish: Literal["stop", "length"]) -> Generated:
        """Return all of it."""
        return Generated(self.token_ids, self._logprobs, self._spans, finish)

    def _append(self, part: Part) -> None:
        self.empty = 0
        if not self.token_ids:  # most generations are one answer, which is not copied
            self.token_ids, self._logprobs, self._spans = part.token_ids, part.logprobs, part.spans
            return
        for start, version in part.spans:
            if self._spans[-1][1] != version:
                self._spans.append((start + len(self.token_ids), version))
        self.token_ids += part.token_ids
        self._logprobs += part.logprobs
