"""Policy losses as pure functions of per-token tensors, and how tokens are averaged.

Notation, per contributing token: `l` = log pi_theta (carries the gradient), `b` = log of the behaviour policy (what the engine sampled
from), `p` = log of the proximal policy (the weights at the start of the step, no gradient), `A` = the advantage, `sg` = no gradient flows.
All tensors are float32 of shape (c,). Each loss returns a value per token, to be minimised, and whether a clip or cap took hold.

Log ratios are limited to +-20 before `exp`: a token that one policy calls impossible must not make a loss infinite.
"""

# ruff: noqa: ARG001  (all losses have one signature; most leave a part of it unused)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, assert_never

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LOG_RATIO_LIMIT = 20.0


class TokenLoss(NamedTuple):
    """`value` float32 (c): the loss per token; `clipped` bool (c): tokens whose ratio was clipped, or whose weight was capped."""

    value: Tensor
    clipped: Tensor


@dataclass(frozen=True, slots=True)
class LossLimits:
    """Clip range of ratios (1 - clip_low .. 1 + clip_high) and the cap of truncated importance weights."""

    clip_low: float
    clip_high: float
    importance_cap: float


Loss = Callable[[Tensor, Tensor, Tensor, Tensor, LossLimits], TokenLoss]


def reinforce(logprobs: Tensor, behaviour: Tensor, proximal: Tensor, advantages: Tensor, limits: LossLimits) -> TokenLoss:
    """-A l: the plain policy gradient, uncorrected for staleness (for demonstrations).

    Source: Williams 1992, REINFORCE (Machine Learning 8).
    """
    return TokenLoss(-advantages * logprobs, torch.zeros_like(logprobs, dtype=torch.bool))


def ppo(logprobs: Tensor, behaviour: Tensor, proximal: Tensor, advantages: Tensor, limits: LossLimits) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(l - b), the ratio to the behaviour policy.

    Source: PPO, arXiv 1707.06347, equation 7; a wider upper clip as in DAPO, arXiv 2503.14476.
    """
    return _clipped(logprobs, behaviour, advantages, limits)


def tis(logprobs: Tensor, behaviour: Tensor, proximal: Tensor, advantages: Tensor, limits: LossLimits) -> TokenLoss:
    """-sg(min(exp(l - b), cap)) A l: the policy gradient under a truncated importance weight.

    Source: truncated importance sampling, Ionides 2008; in a policy gradient, IMPALA, arXiv 1802.01561 (rho bar); per token of a language
    model, with a gradient through `l` only, MiniMax-M1 (CISPO), arXiv 2506.13585.
    """
    weight = _ratio(logprobs.detach(), behaviour)
    return TokenLoss(-weight.clamp(max=limits.importance_cap) * advantages * logprobs, weight > limits.importance_cap)


def decoupled_ppo(logprobs: Tensor, behaviour: Tensor, proximal: Tensor, advantages: Tensor, limits: LossLimits) -> TokenLoss:
    """-min(exp(p - b), cap) min(u A, clip(u, 1 - low, 1 + high) A) with u = exp(l - p): clipped around the proximal policy.

    The clip bounds one step's change, whatever the staleness; the weight corrects for who sampled. `clipped` reports the clip of u.
    Source: decoupled PPO, arXiv 2110.00641, and for asynchronous RL of language models AReaL, arXiv 2505.24298; the cap is a truncated
    importance weight as in `tis`.
    """
    inner = _clipped(logprobs, proximal, advantages, limits)
    return TokenLoss(_ratio(proximal, behaviour).clamp(max=limits.importance_cap) * inner.value, inner.clipped)


LOSSES: dict[str, Loss] = {"decoupled_ppo": decoupled_ppo, "tis": tis, "ppo": ppo, "reinforce": reinforce}
"""The losses that a config names."""


def _ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    return (logprobs - other).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()


def _clipped(logprobs: Tensor, anchor: Tensor, advantages: Tensor, limits: LossLimits) -> TokenLoss:
    ratio = _ratio(logprobs, anchor)
    free = ratio * advantages
    held = ratio.clamp(1 - limits.clip_low, 1 + limits.clip_high) * advantages
    return TokenLoss(-torch.minimum(free, held), held < free)


def token_weights(
    aggregation: Literal["token", "sequence", "constant"],
    sampled_lengths: npt.NDArray[np.int64],
    constant: int,
) -> npt.NDArray[np.float32]:
    """Return per sample the factor of its tokens' losses; the loss of a minibatch is the plain sum of factor x token loss.

    `sampled_lengths` int64 (samples): tokens in the loss of each sample of the minibatch *before the staleness mask*: a mask removes a
    token's loss and leaves the weight of its neighbours as it was. A sample that is masked as a whole is in no batch, and counts nowhere.

    `token`: 1 / (all sampled tokens), a mean over tokens (DAPO, arXiv 2503.14476). `sequence`: 1 / (samples x own length), a mean of
    means (GRPO, arXiv 2402.03300). `constant`: 1 / (samples x `constant`), no length in it (Dr. GRPO, arXiv 2503.20783).
    """
    n = len(sampled_lengths)
    match aggregation:
        case "token":
            factors = np.full(n, 1.0 / max(1, sampled_lengths.sum()))
        case "sequence":
            factors = 1.0 / (n * np.maximum(1, sampled_lengths))
        case "constant":
            factors = np.full(n, 1.0 / (n * max(1, constant)))
        case _:
            assert_never(aggregation)
    return factors.astype(np.float32)
