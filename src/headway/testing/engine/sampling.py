"""How the fake engine picks tokens and what their log-probabilities are: told by seeds, prompts and weights, the same each time.

A sampled token is told by the request's seed; a greedy one (temperature 0, top_k 1, or next to no top_p) by all tokens before it, the
weights of the moment and whether its context was computed under them: who compares greedy continuations learns which weights wrote what.
At temperature 1 the log-probability is `logprob_of`, or that of the loaded probe.npz where the prompt is the probe's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from headway.testing.engine.calls import SGLANG_PATH, Call
from headway.testing.engine.script import EngineScript, Reply, logprob_of
from headway.testing.engine.weights import Weights

_ONE_TOKEN = 1e-3
_STALE = 0.5  # what a context of other weights costs


@dataclass(frozen=True, slots=True)
class Sampler:
    """Picks the tokens of one call."""

    call: Call
    reply: Reply
    script: EngineScript
    weights: Weights

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self._asks_greedy or self.call.top_p <= _ONE_TOKEN

    @property
    def _asks_greedy(self) -> bool:
        return self.call.temperature == 0.0 or self.call.top_k == 1

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids that end a greedy generation; others are planned to their end."""
        return self.call.stops if self.reply.ids is None and self.is_greedy else ()

    def token(self, planned: int, before: Sequence[int], *, stale: bool) -> int:
        """Return the token after prompt and `before`; `planned` is the one of the seed."""
        if self.reply.ids is not None or not self.is_greedy:
            return planned
        state = [self.call.prompt, list(before), self.weights.mark, self.call.adapter, stale]
        number = int.from_bytes(hashlib.sha256(repr(state[0] + state[1]).encode() + repr(state[2:]).encode()).digest()[:4])  # type: ignore[operator]
        return self.script.first_id + number % (self.script.vocabulary - self.script.first_id)

    def logprob(self, token: int, index: int, *, stale: bool) -> float:
        """Return the log-probability of the token at `index` in the distribution that it was drawn from; "raw": before that was made."""
        plain = self._at_one(token, index) - stale * _STALE
        if self.reply.logprobs == "raw" or (self.call.path == SGLANG_PATH and self._asks_greedy):
            return plain  # SGLang decodes greedily without scaling, and never renormalises over top_p and top_k
        return 0.0 if self.is_greedy and self.call.path != SGLANG_PATH else plain / self.call.temperature

    def _at_one(self, token: int, index: int) -> float:
        probe = self.weights.probe
        if index == 0 and probe is not None and self.call.prompt == probe[0] and token < len(probe[1]):
            return probe[1][token]
        return logprob_of(token, index)
