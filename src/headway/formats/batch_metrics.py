"""The orchestrator's part of a `metrics.jsonl` row: what batch `k` consists of, and how stale what it trains on is.

Counts cover the whole record, replayed rollouts included; staleness (`batch_staleness`) is that of live ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.formats.batch_staleness import Spans, staleness_figures
from headway.formats.records import Records


def metrics_row(records: Records, contributing: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Return the row of a batch; `contributing` bool (n) says which tokens train, at least one.

    `masked_tokens` are in the loss as sampled and do not contribute; `trainable_share` is the share of those in the loss that do.
    """
    batch, rollouts, columns = records.batch, records.rollouts, records.columns
    rewards = np.array([rollout.reward for rollout in rollouts], np.float64)
    named: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.rewards.items():
            if math.isfinite(value):
                named.setdefault(name, []).append(value)
    tokens = len(columns.token_ids)
    lengths = np.diff(records.rollout_starts, append=tokens)
    members = sum(group.admission.members for group in batch.groups)
    in_loss, trained_on = int(np.count_nonzero(columns.loss)), int(np.count_nonzero(contributing))
    return {
        "batch": batch.k,
        "time": time.time(),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_mean_all": float(rewards.sum()) / members,
        **{f"reward/{name}_mean": math.fsum(values) / len(values) for name, values in sorted(named.items())},
        **{f"reward/{name}_share": len(values) / len(rollouts) for name, values in sorted(named.items())},
        **staleness_figures(batch, version_spans(records, contributing)),
        "groups": len(batch.groups),
        "zero_advantage_groups": sum(group.zero_advantage for group in batch.groups),
        "rollouts": len(rollouts),
        "lost_rollouts": members - len(rollouts),
        "lost_share": (members - len(rollouts)) / members,
        "samples": len(records.tokens),
        "tokens": tokens,
        "contributing_tokens": trained_on,
        "masked_tokens": in_loss - trained_on,
        "trainable_share": trained_on / in_loss,
        "truncated_share": sum(rollout.finish != "stop" for rollout in rollouts) / len(rollouts),
        "rollout_tokens_mean": float(lengths.mean()),
        "rollout_tokens_max": int(lengths.max()),
    }


def version_spans(records: Records, contributing: npt.NDArray[np.bool_]) -> Spans:
    """Return the batch's sampled tokens by their version stamps; `contributing` bool (n) says which tokens train."""
    columns = records.columns
    per_sample = np.add.reduceat(columns.sampled, records.sample_starts, dtype=np.int64)
    starts = columns.span_start + (per_sample.cumsum() - per_sample).repeat(columns.spans)
    sampled = int(per_sample.sum())
    return Spans(
        rollout=records.rollout.repeat(columns.spans),
        version=columns.span_version.astype(np.int64),
        sampled=np.diff(starts, append=sampled),
        in_loss=np.add.reduceat(columns.loss[columns.sampled], starts, dtype=np.int64),
        contributing=np.add.reduceat(contributing[columns.sampled], starts, dtype=np.int64),
    )


def joined(row: Mapping[str, Any], trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch's row with what its trainer measured: a figure named like one of the row's stands beside it as `trainer/<name>`."""
    return {**row, **{f"trainer/{name}" if name in row else name: value for name, value in trainer.items() if name != "batch"}}
