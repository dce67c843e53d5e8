"""The rollouts of a batch opened together: their tokens side by side, each sampled token with its version.

Everything is vectorised over the batch: payloads are opened as views, concatenated once, and checked once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from headway.errors import StorageError
from headway.formats.rollout import DEFAULT_POLICY, Columns, decode_columns, decode_tail, span_lengths
from headway.types import Batch, Rollout

NOT_SAMPLED = -1  # also the version of what no engine of this run wrote: replayed and external rollouts


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """All rollouts of a batch (r), their samples (s) and tokens (n), as they were sampled: before any staleness mask.

    Per rollout: `group` its place among the batch's groups, `advantage` float64, and `live` bool: written by the engines of this run. Per
    sample: `rollout` its row, `tokens`, both int64, and `policies`. Per token: `columns` (where `loss` is the mask as sampled) and
    `versions` int32, -1 where not sampled and where not live.
    """

    batch: Batch
    rollouts: tuple[Rollout, ...]
    group: npt.NDArray[np.int64]
    advantage: npt.NDArray[np.float64]
    live: npt.NDArray[np.bool_]
    rollout: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    policies: tuple[str, ...]
    columns: Columns
    versions: npt.NDArray[np.int32]

    @property
    def sample_starts(self) -> npt.NDArray[np.int64]:
        """First token of each sample, int64 (s)."""
        return self.tokens.cumsum() - self.tokens

    @property
    def token_live(self) -> npt.NDArray[np.bool_]:
        """Whether a token belongs to a live rollout, bool (n)."""
        return self.live[self.rollout].repeat(self.tokens)

    @property
    def rollout_starts(self) -> npt.NDArray[np.int64]:
        """First token of each rollout, int64 (r); every rollout has a sample."""
        first_sample: npt.NDArray[np.int64] = np.flatnonzero(np.diff(self.rollout, prepend=-1))
        return self.sample_starts[first_sample]


def open_records(batch: Batch) -> Records:
    """Open the payloads of a batch; raises StorageError naming the rollout when one is damaged or its group is not whole."""
    rollouts = tuple(rollout for group in batch.groups for rollout in group.rollouts)
    if not rollouts:
        raise StorageError(f"batch {batch.k} holds no rollout")
    advantages = [advantage for group in batch.groups for advantage in group.advantages]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    if not len(advantages) == len(rewards) == len(rollouts) or not np.isfinite([*advantages, *rewards]).all():
        raise StorageError(f"batch {batch.k}: a rollout has no finite reward and advantage")
    parts, policies = zip(*(_open(batch.k, rollout) for rollout in rollouts), strict=True)
    columns = _side_by_side(parts)
    lengths = _span_lengths(batch.k, rollouts, parts, columns)
    versions = np.full(len(columns.token_ids), NOT_SAMPLED, np.int32)
    versions[columns.sampled] = columns.span_version.repeat(lengths)
    live = np.array([rollout.source == "live" for rollout in rollouts])
    if versions[columns.sampled].min(initial=0) < 0:
        _refuse_unknown_versions(batch.k, rollouts, parts)
    rollout = np.arange(len(rollouts)).repeat([len(part.tokens) for part in parts])
    tokens = np.array(columns.tokens)
    if not live.all():
        versions[~live[rollout].repeat(tokens)] = NOT_SAMPLED
    return Records(
        batch=batch,
        rollouts=rollouts,
        group=np.arange(len(batch.groups)).repeat([len(group.rollouts) for group in batch.groups]),
        advantage=np.array(advantages, np.float64),
        live=live,
        rollout=rollout,
        tokens=tokens,
        policies=tuple(chain.from_iterable(policies)),
        columns=columns,
        versions=versions,
    )


def _named(k: int, rollout: Rollout, error: StorageError) -> StorageError:
    return StorageError(f"batch {k}: rollout {rollout.group}-{rollout.member}: {error}")


def _open(k: int, rollout: Rollout) -> tuple[Columns, list[str]]:
    """Return the token data of one rollout and the policy of each of its samples."""
    try:
        columns = decode_columns(rollout.payload)
        tail = decode_tail(columns)
    except StorageError as error:
        raise _named(k, rollout, error) from error
    return columns, [policy for policy, _ in tail] if tail else [DEFAULT_POLICY] * len(columns.tokens)


def _span_lengths(k: int, rollouts: Sequence[Rollout], parts: Sequence[Columns], columns: Columns) -> npt.NDArray[np.int64]:
    """Check all rollouts at once; only when something is wrong, find out with whom."""
    try:
        return span_lengths(columns)
    except StorageError:
        for rollout, part in zip(rollouts, parts, strict=True):
            try:
                span_lengths(part)
            except StorageError as error:
                raise _named(k, rollout, error) from error
        raise


def _refuse_unknown_versions(k: int, rollouts: Sequence[Rollout], parts: Sequence[Columns]) -> None:
    """Raise StorageError for a live rollout with a token that no version of this run has written."""
    for rollout, part in zip(rollouts, parts, strict=True):
        if rollout.source == "live" and part.span_version.min(initial=0) < 0:
            raise _named(k, rollout, StorageError(f"a live rollout has a stamp of {part.span_version.min()}, which is no version"))


def _side_by_side(parts: Sequence[Columns]) -> Columns:
    return Columns(
        tokens=tuple(n for part in parts for n in part.tokens),
        spans=tuple(m for part in parts for m in part.spans),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        sampled=np.concatenate([part.sampled for part in parts]),
        loss=np.concatenate([part.loss for part in parts]),
        span_start=np.concatenate([part.span_start for part in parts]),
        span_version=np.concatenate([part.span_version for part in parts]),
        tail=memoryview(b""),
    )
