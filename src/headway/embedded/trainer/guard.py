"""The double lock: what a batch must satisfy before the trainer learns from it, recomputed from the arrays themselves.

`formats.batch.read_batch` has refused what no reader can use (damage, lengths, values that are not finite). What is checked here needs the
trainer's own knowledge: its version, its model, the run's config. The bound is checked once more, against these and not against what the
batch says of itself. Nothing here warns: a batch that breaks a rule ends the trainer by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.embedded.trainer.packing import Ints
from headway.errors import BoundBreached, TrainerFailed
from headway.formats.batch import TrainerBatch
from headway.settings import RolloutSection

NOT_LIVE = -1  # staleness of what no engine of this run wrote: it has none


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """A batch that passed, as the step takes it; n samples, t tokens.

    `token_ids` int64 (t); `mask` bool (t): contributing; `logprobs` float32 (t): behaviour; `advantages` float32 (t); `staleness` int64
    (t): k minus version, -1 where not sampled or not live; `offsets` int64 (n + 1); `groups` int64 (n): equal numbers for samples of one
    group; `sampled_lengths` int64 (n): tokens in the loss before the staleness mask. `temperature`: the behaviour policy's.
    """

    k: int
    token_ids: Ints
    mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    staleness: Ints
    offsets: Ints
    groups: Ints
    sampled_lengths: Ints
    temperature: float


def admit(batch: TrainerBatch, *, version: int, vocabulary: int, rollout: RolloutSection) -> TrainingBatch:
    """Check a batch for the trainer at `version` and return it as the step takes it; token ids below `vocabulary` exist.

    Raises:
        BoundBreached: a contributing token is older than max_staleness allows (unless on_stale is "train"), or newer than `version`; or the
            batch gives itself more room than `rollout`, the config of the run, does.
        TrainerFailed: it is another version's batch, or its tokens cannot be trained on by this model.
    """
    if batch.max_staleness > rollout.max_staleness or (batch.on_stale == "train" and rollout.on_stale != "train"):
        raise BoundBreached(
            f'batch {batch.k} says max_staleness = {batch.max_staleness}, on_stale = "{batch.on_stale}", and this run is bound to '
            f'{rollout.max_staleness}, "{rollout.on_stale}" (config.toml): nothing was trained'
        )
    if batch.k != version:
        raise _refusal(batch.k, f"the trainer is at version {version}, whose batch is {version}")
    mask = batch.loss_mask != 0
    token_ids = batch.token_ids.astype(np.int64)
    if token_ids.min() < 0 or token_ids.max() >= vocabulary:
        raise _refusal(batch.k, f"a token id lies outside the model's vocabulary (0..{vocabulary - 1}): engine and trainer differ in model")
    if mask[batch.sample_offsets[:-1]].any():
        raise _refusal(batch.k, "the first token of a sample is in the loss, and nothing stands before it to predict it from")
    contributing = np.add.reduceat(mask, batch.sample_offsets[:-1], dtype=np.int64)
    if (contributing > batch.sample_length).any():
        raise _refusal(batch.k, "a sample has more tokens in the loss than its sample_length")
    if contributing.sum() != batch.contributing_tokens:
        raise _refusal(batch.k, f"{contributing.sum()} tokens are in the loss, its manifest says {batch.contributing_tokens}")
    staleness = version - batch.versions.astype(np.int64)
    live = mask & (batch.versions >= 0)
    if mask.sum() - live.sum() != batch.replayed_tokens:
        raise BoundBreached(
            f"batch {batch.k}: {mask.sum() - live.sum()} tokens in the loss have no version, and its manifest knows of "
            f"{batch.replayed_tokens}: nothing was trained"
        )
    _check_bound(np.where(live, staleness, 0), batch)
    return TrainingBatch(
        k=version,
        token_ids=token_ids,
        mask=mask,
        logprobs=batch.logprobs,
        advantages=batch.advantages,
        staleness=np.where(batch.versions < 0, NOT_LIVE, staleness),
        offsets=batch.sample_offsets,
        groups=batch.sample_group.astype(np.int64),
        sampled_lengths=batch.sample_length.astype(np.int64),
        temperature=batch.temperature,
    )


def _check_bound(staleness: Ints, batch: TrainerBatch) -> None:
    """`staleness` (n) of the contributing live tokens, 0 elsewhere: 0 <= staleness <= max_staleness."""
    youngest, oldest = int(staleness.min(initial=0)), int(staleness.max(initial=0))
    if youngest < 0:
        raise BoundBreached(
            f"batch {batch.k}: a token in the loss is stamped {batch.k - youngest}, a version that does not exist yet "
            f"(row {_row(batch, staleness.argmin())} of rollouts.parquet): nothing was trained; check the engines' labels"
        )
    if batch.on_stale != "train" and oldest > batch.max_staleness:
        raise BoundBreached(
            f"batch {batch.k}: a token in the loss is of version {batch.k - oldest}, staleness {oldest}, and max_staleness is "
            f"{batch.max_staleness} (row {_row(batch, staleness.argmax())} of rollouts.parquet): nothing was trained; whoever made this "
            "batch did not keep the bound"
        )


def _row(batch: TrainerBatch, token: np.intp) -> int:
    """Return the row in rollouts.parquet of the rollout that a token belongs to."""
    return int(batch.sample_rollout[np.searchsorted(batch.sample_offsets, token, side="right") - 1])


def _refusal(k: int, reason: str) -> TrainerFailed:
    return TrainerFailed(f"batch {k}: {reason}: nothing was trained; the batch must be made again")
