"""What a scorer sees of a rollout, and how its verdict is read.

A scorer is `async def score(prompt, rollouts)`, or a plain function, which runs in a thread. It gets the `Prompt` and a sequence of
`RolloutView`: one rollout, or all of a group together (`environment.score_scope`), and returns one verdict per rollout, in order; for a
single rollout the verdict alone will do. A verdict is a number, None ("nobody can tell": the member is lost, never counted as 0), or a
`headway.types.Score` with named parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from headway.formats.rollout import decode_samples
from headway.types import Finish, Rollout, Sample, Score
from headway.worker.rewards import finite
from headway.worker.tokenizer import ModelTokenizer


class RolloutView:
    """A finished rollout as a scorer sees it; decoded only where looked at."""

    def __init__(self, rollout: Rollout, tokenizer: ModelTokenizer) -> None:
        self._rollout = rollout
        self._tokenizer = tokenizer

    @property
    def reward(self) -> float | None:
        """What the environment gave, if it gave anything."""
        return self._rollout.reward

    @property
    def rewards(self) -> Mapping[str, float]:
        """Named parts that the environment gave."""
        return self._rollout.rewards

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The outcome's metadata."""
        return self._rollout.metadata

    @property
    def finish(self) -> Finish:
        """How the rollout ended."""
        return self._rollout.finish

    @cached_property
    def samples(self) -> Sequence[Sample]:
        """The token sequences, one per conversation."""
        return decode_samples(self._rollout.payload)

    @cached_property
    def text(self) -> str:
        """The first conversation as text, special tokens kept."""
        return self._tokenizer.decode(self.samples[0].token_ids.tolist())

    @cached_property
    def turns(self) -> Sequence[str]:
        """What the policy wrote, one text per uninterrupted stretch of sampled tokens, over all conversations; end tokens left out."""
        texts: list[str] = []
        for sample in self.samples:
            edges = np.flatnonzero(np.diff(sample.sampled_mask, prepend=False, append=False))
            for start, end in edges.reshape(-1, 2):
                ids = sample.token_ids[start:end].tolist()
                ended_by_special = self._tokenizer.special_text(ids[-1])
                texts.append(self._tokenizer.decode(ids[:-1] if ended_by_special else ids))
        return texts

    @property
    def completion(self) -> str:
        """What the policy wrote last."""
        return self.turns[-1]


def read_verdict(verdict: Any, rollouts: int) -> list[Score] | str:
    """Return the scores that a scorer's answer gives to `rollouts` rollouts, or what is wrong with it, as a text."""
    if isinstance(verdict, Sequence) and not isinstance(verdict, str):
        verdicts = list(verdict)
    elif rollouts == 1:
        verdicts = [verdict]
    else:
        return f"the scorer returned {verdict!r} for {rollouts} rollouts: it must return a list with one verdict for each"
    if len(verdicts) != rollouts:
        return f"the scorer returned {len(verdicts)} verdicts for {rollouts} rollouts"
    return [_score(each) for each in verdicts]


def _score(verdict: Any) -> Score:
    if isinstance(verdict, Score):
        parts = {name: number for name, value in verdict.rewards.items() if (number := finite(value)) is not None}
        return Score(finite(verdict.reward), parts)
    return Score(finite(verdict))
