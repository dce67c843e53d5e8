"""One generation as the engine sees it, from arrival to end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True, eq=False)
class Request:
    """One generation, from arrival to end. The fields below the line are the scheduler's, complete once `finish_reason` is set."""

    key: int
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_ids: tuple[int, ...]  # end-of-sequence ids included, unless ignored

    row: int = -1
    spans: list[tuple[str, int]] = field(default_factory=list)  # (label, first output token it wrote)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def stamped_spans(self) -> list[tuple[str, int, int]]:
        """Return (label, start, end) over the output tokens, without empty spans."""
        ends = [*(start for _, start in self.spans[1:]), len(self.token_ids)]
        return [(label, start, end) for (label, start), end in zip(self.spans, ends, strict=False) if end > start]
