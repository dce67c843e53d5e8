"""One trainer step: a batch in, optimiser steps on the weights, measurements out.

Whole groups are dealt to `minibatches` minibatches, each packed and run pack by pack, one optimiser step each. The loss of a minibatch is a
plain sum of weighted token losses, so it does not depend on how samples were packed. With `decoupled_ppo` the proximal log-probabilities
are computed before the first optimiser step; those of the first minibatch are its own forward pass (the weights have not moved yet).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.embedded.trainer.guard import TrainingBatch
from headway.embedded.trainer.losses import LOSSES, LossLimits, token_weights
from headway.embedded.trainer.metrics import against_behaviour
from headway.embedded.trainer.packing import Ints, Pack, deal, pack
from headway.embedded.trainer.scoring import Policy
from headway.errors import TrainerFailed
from headway.settings import TrainerSection


class Interrupted(Exception):
    """The step was abandoned between two packs because the trainer shall end; nothing of it was written."""


@dataclass(slots=True)
class _Tally:
    """Sums over the step, kept on the device until its end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)


def learning_rate(settings: TrainerSection, k: int, steps: int) -> float:
    """Return the learning rate of batch `k`: linear warm-up to the peak, then constant or a cosine that ends at `schedule_steps`.

    A pure function of k, so a resumed trainer needs no schedule state. `steps`: run.steps, where the cosine ends by default.
    """
    if k < settings.warmup_steps:
        return settings.learning_rate * (k + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    end = settings.schedule_steps or steps
    progress = min(1.0, (k - settings.warmup_steps) / max(1, end - settings.warmup_steps))
    floor = settings.final_learning_rate_share
    return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimiser(policy: Policy, settings: TrainerSection) -> torch.optim.AdamW:
    """Return AdamW over the float32 weights; matrices decay, vectors (norms, biases) do not."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)


def train(
    policy: Policy,
    optimiser: torch.optim.Optimizer,
    batch: TrainingBatch,
    settings: TrainerSection,
    *,
    rate: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train on one batch at learning rate `rate`; return its measurements (FORMATS: metrics.jsonl, the trainer's part).

    `interrupted` is asked before each pack.

    Raises:
        Interrupted: `interrupted` said so; the weights in memory are then of no version.
        TrainerFailed: a gradient is not finite.
    """
    for group in optimiser.param_groups:
        group["lr"] = rate
    hands = deal(batch.groups, settings.minibatches)
    packed = [pack(batch.offsets, batch.mask, hand, settings.max_tokens_per_microbatch) for hand in hands]
    start = torch.full((len(batch.token_ids),), math.nan, device=policy.device)
    if settings.loss == "decoupled_ppo":
        _score_ahead(policy, batch, [one for packs in packed[1:] for one in packs], start, interrupted)
    tally = _Tally()
    for index, (hand, packs) in enumerate(zip(hands, packed, strict=True)):
        _minibatch(policy, optimiser, batch, settings, hand, packs, start, tally, interrupted, first=index == 0)
    return _measurements(batch, start, tally) | {"learning_rate": rate}


@torch.no_grad()
def _score_ahead(policy: Policy, batch: TrainingBatch, packs: list[Pack], start: Tensor, interrupted: Callable[[], bool]) -> None:
    """Fill `start` with log-probabilities under the weights that the step starts from."""
    for one in packs:
        if interrupted():
            raise Interrupted
        if len(one.contributing):
            start[_tensor(policy, one.contributing)] = policy.score(one, batch.token_ids, batch.temperature).logprobs


def _minibatch(
    policy: Policy,
    optimiser: torch.optim.Optimizer,
    batch: TrainingBatch,
    settings: TrainerSection,
    hand: Ints,
    packs: list[Pack],
    start: Tensor,
    tally: _Tally,
    interrupted: Callable[[], bool],
    *,
    first: bool,
) -> None:
    """Accumulate the gradient of one minibatch over its packs, and step. Without a contributing token nothing moves."""
    limits = LossLimits(settings.clip_low, settings.clip_high, settings.importance_cap)
    constant = settings.constant_denominator_tokens or int(batch.sampled_lengths.max(initial=1))
    factors = np.zeros(len(batch.sampled_lengths), dtype=np.float32)
    factors[hand] = token_weights(settings.aggregation, batch.sampled_lengths[hand], constant)
    optimiser.zero_grad(set_to_none=True)
    total = torch.zeros((), device=policy.device)
    packs = [one for one in packs if len(one.contributing)]
    for one in packs:
        if interrupted():
            raise Interrupted
        scores = policy.score(one, batch.token_ids, batch.temperature)
        where = _tensor(policy, one.contributing)
        if first:
            start[where] = scores.logprobs.detach()
        token = LOSSES[settings.loss](
            scores.logprobs,
            _tensor(policy, batch.logprobs[one.contributing]),
            start[where],
            _tensor(policy, batch.advantages[one.contributing]),
            limits,
        )
        weights = _tensor(policy, factors[one.samples])
        objective = (weights * (token.value - settings.entropy_bonus * scores.entropy)).sum()
        objective.backward()
        total += objective.detach()
        tally.entropy.append(scores.entropy.detach())
        tally.clipped.append(token.clipped)
    if packs:
        tally.norms.append(_step(policy, optimiser, settings, batch.k))
        tally.losses.append(float(total))


def _step(policy: Policy, optimiser: torch.optim.Optimizer, settings: TrainerSection, k: int) -> float:
    """Clip, step, and return the gradient's norm before clipping."""
    norm = float(torch.nn.utils.clip_grad_norm_(policy.model.parameters(), settings.gradient_clip or math.inf))
    if not math.isfinite(norm):
        raise TrainerFailed(
            f"batch {k}: the gradient's norm is {norm}: lower trainer.learning_rate, or look for extreme advantages in the batch"
        )
    optimiser.step()
    return norm


def _measurements(batch: TrainingBatch, start: Tensor, tally: _Tally) -> dict[str, Any]:
    """Means over minibatches (`loss`, with the entropy bonus in it; `grad_norm`) and over contributing tokens (the rest)."""
    contributing = np.flatnonzero(batch.mask)
    return {
        "loss": float(np.mean(tally.losses)) if tally.losses else None,
        "grad_norm": float(np.mean(tally.norms)) if tally.norms else None,
        "entropy": float(torch.cat(tally.entropy).mean()) if tally.entropy else None,
        "clip_share": float(torch.cat(tally.clipped).float().mean()) if tally.clipped else None,
        **against_behaviour(start.cpu().numpy()[contributing], batch.logprobs[contributing], batch.staleness[contributing]),
    }


def _tensor(policy: Policy, array: Any) -> Tensor:
    return torch.from_numpy(array).to(policy.device)
