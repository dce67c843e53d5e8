"""The policy as the trainer sees it: log-probabilities and entropies of contributing tokens in a pack.

The decoder runs over the whole pack; the output head only over the hidden states that predict a contributing token, in slices when the
vocabulary is large, so logits never take more than about a gigabyte. Log-probabilities are those of the distribution the engine sampled
from: logits divided by the temperature (1 where the temperature is 0: greedy decoding samples from no distribution).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headway.embedded.trainer.attention import Segments, install
from headway.embedded.trainer.packing import Ints, Pack, pack
from headway.errors import TrainerFailed

LOGITS_AT_ONCE = 1 << 26
_SELF_TEST_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}
_SELF_TEST_LENGTHS = (7, 5, 5, 3, 2, 1)


class TokenScores(NamedTuple):
    """Per contributing token of a pack, in its order, float32 (c): log-probability and exact entropy over the vocabulary."""

    logprobs: Tensor
    entropy: Tensor


class Policy:
    """A Hugging Face decoder that scores packs.

    `dtype` is what it computes in, its weights stay float32. Past `logits_at_once` (positions x vocabulary) the head runs in slices that
    are recomputed in the backward pass.
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype, *, logits_at_once: int = LOGITS_AT_ONCE) -> None:
        install(model)
        self.model = model.to(device).eval()  # the engine samples without dropout, so the trainer scores without it
        self.device = device
        self.dtype = dtype
        self.vocabulary: int = model.get_output_embeddings().weight.shape[0]
        self._positions_at_once = max(1, logits_at_once // self.vocabulary)

    def score(self, packed: Pack, token_ids: Ints, temperature: float) -> TokenScores:
        """Score the contributing tokens of a pack; `token_ids` int64: the batch's flat array."""
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            predicting = self._hidden(packed, token_ids).index_select(0, self._tensor(packed.predictors))
            return self._read(predicting, self._tensor(token_ids[packed.contributing]), temperature)

    @torch.no_grad()
    def next_logprobs(self, prompt: Ints) -> Tensor:
        """Return the log-probabilities float32 (vocabulary) of the token after `prompt` int64 (n) at temperature 1."""
        token_ids = np.append(prompt, 0)
        mask = np.zeros(len(token_ids), dtype=bool)
        mask[-1] = True
        (packed,) = pack(np.array([0, len(token_ids)]), mask, np.array([0]), len(token_ids))
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            hidden = self._hidden(packed, token_ids).index_select(0, self._tensor(packed.predictors))
            logits: Tensor = self.model.get_output_embeddings()(hidden)[0].float()
        return logits.log_softmax(-1)

    def _hidden(self, packed: Pack, token_ids: Ints) -> Tensor:
        """Return the last hidden states (t, width) of a pack."""
        states: Tensor = self.model.base_model(
            input_ids=self._tensor(token_ids[packed.source])[None],
            position_ids=self._tensor(packed.positions)[None],
            use_cache=False,
            segments=Segments.of(packed.runs, self.device, self.dtype),
        ).last_hidden_state[0]
        return states

    def _read(self, hidden: Tensor, targets: Tensor, temperature: float) -> TokenScores:
        """Apply the output head: hidden (c, width), targets int64 (c)."""
        if len(targets) <= self._positions_at_once:
            return TokenScores(*self._slice(hidden, targets, temperature))
        parts = [
            checkpoint(self._slice, h, t, temperature, use_reentrant=False)
            for h, t in zip(hidden.split(self._positions_at_once), targets.split(self._positions_at_once), strict=True)
        ]
        return TokenScores(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))

    def _slice(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self.model.get_output_embeddings()(hidden).float()
        if temperature not in {0.0, 1.0}:
            logits = logits / temperature
        everything = logits.log_softmax(-1)
        return everything.gather(-1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(-1)

    def _tensor(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self.device)


@torch.no_grad()
def self_test(policy: Policy) -> float:
    """Compare packed scores with the model's own forward, one sample at a time; return the largest difference.

    Catches what would otherwise train silently on wrong gradients: attention across samples, positions that do not restart, a model whose
    logits are more than its output head (scaled, capped).

    Raises:
        TrainerFailed: they differ by more than 1e-4 (.25 in bfloat16; a packing error shows as 1 and more).
    """
    lengths = np.asarray(_SELF_TEST_LENGTHS)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    token_ids = np.random.default_rng(0).integers(0, policy.vocabulary, offsets[-1])
    mask = np.ones(offsets[-1], dtype=bool)
    mask[offsets[:-1]] = False
    (packed,) = pack(offsets, mask, np.arange(len(lengths)), int(offsets[-1]))
    ours = policy.score(packed, token_ids, 1.0).logprobs
    packed_attention = policy.model.config._attn_implementation
    policy.model.set_attn_implementation("sdpa")
    try:
        theirs = torch.cat([_plain(policy, ids) for ids in np.split(token_ids, offsets[1:-1])])
    finally:
        policy.model.set_attn_implementation(packed_attention)
    difference = float((ours - theirs).abs().max())
    tolerance = _SELF_TEST_TOLERANCE[policy.dtype]
    if not difference <= tolerance:
        raise TrainerFailed(
            f"trainer self-test: packed and unpacked log-probabilities of {policy.model.config.model_type} differ by {difference:.2g} "
            f'(at most {tolerance:g}): this model cannot be trained packed; use trainer.kind = "external"'
        )
    return difference


def _plain(policy: Policy, token_ids: Ints) -> Tensor:
    """Log-probabilities of all tokens but the first of one sample, by the model's own forward."""
    ids = torch.from_numpy(token_ids).to(policy.device)
    with torch.autocast(policy.device.type, dtype=policy.dtype, enabled=policy.dtype != torch.float32):
        logits = policy.model(input_ids=ids[None], use_cache=False).logits[0].float()
    return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
