"""Sampling for a whole batch at once, reproducible per request.

The processed distribution is softmax(logits / temperature), cut to the top k, then to the smallest set of at least top-p mass (of what
top-k left), then renormalised. A token is its inverse CDF at a uniform that depends on (seed, index of the token) only, so what else runs
in the batch does not matter. Reported log-probabilities are those of the processed distribution; greedy decoding is a distribution of
one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

GREEDY_BELOW = 1e-5  # temperatures under this are greedy, as in vLLM

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Knobs:
    """How each of n rows samples. `top_k` 0 and `top_p` 1: off. `uniforms` [n] in [0, 1)."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    uniforms: npt.NDArray[np.float64]


def sample(logits: torch.Tensor, knobs: Knobs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids int64 [n] and their processed log-probabilities float32 [n] for logits float32 [n, vocabulary].

    Rows whose logits are not finite get a log-probability that is not finite either: the caller must look.
    """
    device = logits.device
    greedy = knobs.temperature < GREEDY_BELOW
    temperature = torch.from_numpy(np.where(greedy, np.float32(1), knobs.temperature)).to(device)
    peak = logits.amax(-1, keepdim=True)
    scaled = (logits - peak).div_(temperature[:, None])  # peak first: a small temperature cannot overflow
    if (knobs.top_k > 0).any() or (knobs.top_p < 1).any():
        scaled = _filtered(scaled, torch.from_numpy(knobs.top_k).to(device), torch.from_numpy(knobs.top_p).to(device))
    logprobs = scaled.log_softmax(-1)
    # Double precision keeps u * total below total, so a token without probability is never chosen.
    cumulative = logprobs.double().exp_().cumsum(-1)
    target = torch.from_numpy(knobs.uniforms).to(device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[1] - 1)
    chosen = logprobs.gather(1, tokens)
    if greedy.any():
        rows = torch.from_numpy(greedy).to(device)[:, None]
        tokens = torch.where(rows, logits.argmax(-1, keepdim=True), tokens)
        chosen = torch.where(rows, peak - peak, chosen)
    return tokens[:, 0], chosen[:, 0]


def _filtered(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return `scaled` [n, vocabulary] with -inf outside top-k, then outside top-p."""
    ordered, order = scaled.sort(stable=True, dim=-1, descending=True)
    vocabulary = scaled.shape[1]
    limit = torch.where(top_k > 0, top_k, vocabulary)[:, None]
    keep = torch.arange(vocabulary, device=scaled.device) < limit
    probabilities = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # Rounding may let the running sum reach 1 early: rows without top-p keep their whole tail.
    keep &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    keep[:, 0] = True
    return scaled.masked_fill(~torch.zeros_like(keep).scatter_(1, order, keep), -torch.inf)


def uniforms(seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return one uniform in [0, 1) with 53 random bits per (seed, index): splitmix64 as a counter-based generator.

    Constants: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), variant 13 of Stafford's mixers.
    """
    mixed = _mix(_mix(seeds) + (indices + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
