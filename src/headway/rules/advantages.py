"""Advantages: the rewards of one group in, one number per rollout out.

Each function takes the rewards of all scored members of a group (float64, shape (n,), finite, n >= 1) and returns advantages of the same
shape: finite, within the range of float32 (batches carry float32), and exactly zero for every member when all were scored alike. They are
computed over all scored members before any token is masked, so a mask never moves the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headway.errors import EnvironmentFailed

Rewards = npt.NDArray[np.float64]
Advantages = Callable[[Rewards], Rewards]

STD_EPSILON = 1e-6
_LIMIT = float(np.finfo(np.float32).max)


def grpo(rewards: Rewards) -> Rewards:
    """Return (r - mean) / (std + 1e-6), with the population standard deviation (division by n).

    Source: GRPO, arXiv 2402.03300 (outcome supervision), which leaves open which standard deviation; n also serves a group of one.
    """
    centred = _centred(rewards)
    return _bounded(centred / (_population_std(centred) + STD_EPSILON))


def dr_grpo(rewards: Rewards) -> Rewards:
    """Return r - mean: no division, so prompts of every difficulty weigh alike.

    Source: Dr. GRPO, arXiv 2503.20783; its other half is `trainer.aggregation = "constant"`.
    """
    return _bounded(_centred(rewards))


def rloo(rewards: Rewards) -> Rewards:
    """Return r_i - mean of the others = (r_i - mean) n / (n - 1); zero for a group of one, which has no others.

    Source: REINFORCE leave-one-out, arXiv 2402.14740.
    """
    n = len(rewards)
    return _bounded(_centred(rewards) * (n / (n - 1))) if n > 1 else np.zeros(n)


def max_rl(rewards: Rewards) -> Rewards:
    """Return (r - mean) / mean, and zeros where the mean is 0: rare successes weigh more, as maximum likelihood would have it.

    Source: MaxRL, arXiv 2602.02710, algorithm 1 (its 1/n is left to the loss's aggregation, as for all advantages here). Derived for
    rewards 0 and 1; values between are taken as shares of a success.

    Raises:
        EnvironmentFailed: a reward lies outside 0..1, where the quotient has no meaning.
    """
    outside = rewards[(rewards < 0) | (rewards > 1)]
    if outside.size:
        raise EnvironmentFailed(
            f'rollout.advantage = "max_rl": a reward is {outside[0]:g}, and max_rl is defined for rewards in 0..1 only: '
            'scale the reward, or use "grpo"'
        )
    centred = _centred(rewards)
    largest = rewards.max(initial=0.0)
    # Relative to the largest reward: the mean of subnormal rewards would lose its digits.
    return _bounded(centred / largest / (rewards / largest).mean()) if centred.any() else centred


ADVANTAGES: dict[str, Advantages] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "max_rl": max_rl}
"""The functions that a config names."""

GROUP_RELATIVE = frozenset(ADVANTAGES)
"""Names of those that compare members with each other: in a group of one they are zero, and nothing would be learned."""


def _centred(rewards: Rewards) -> Rewards:
    """Return r - mean; exact zeros when all are equal (the rounded mean of equal numbers need not be one of them)."""
    n = len(rewards)
    if n == 0 or rewards.min() == rewards.max():
        return np.zeros(n)
    held = _bounded(rewards)
    return held - _mean(held)


def _population_std(centred: Rewards) -> float:
    """Return the root of the mean square, scaled so that neither huge nor tiny values overflow or vanish when squared."""
    scale = float(np.abs(centred).max(initial=0.0))
    return scale * math.sqrt(_mean((centred / scale) ** 2)) if scale > 0 else 0.0


def _bounded(values: Rewards) -> Rewards:
    """Return values within the range of float32: `np.clip`, which takes longer for so few."""
    bounded: Rewards = np.minimum(np.maximum(values, -_LIMIT), _LIMIT)
    return bounded


def _mean(values: Rewards) -> float:
    """Return `np.mean`, to the last bit, sooner."""
    return float(np.add.reduce(values)) / len(values)
