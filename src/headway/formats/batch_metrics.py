"""The orchestrator's part of a `metrics.jsonl` row: what batch `k` consists of, and how stale what it trains on is.

Percentiles are nearest-rank over whole versions: the smallest staleness that at least that share is at or below.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.formats.records import Records

_NEVER = np.iinfo(np.int32).max


def _percentile(counts: npt.NDArray[np.int64], share: float) -> int:
    """Return the nearest-rank percentile of values 0, 1, ... that occur `counts` times."""
    cumulative = counts.cumsum()
    return int(np.searchsorted(cumulative, math.ceil(share * int(cumulative[-1]))))


def _staleness(name: str, staleness: npt.NDArray[np.integer[Any]], shares: tuple[int, ...]) -> dict[str, Any]:
    counts = np.bincount(staleness)
    mean = float(counts @ np.arange(len(counts)) / len(staleness))
    row: dict[str, Any] = {f"{name}_staleness_mean": mean}
    row |= {f"{name}_staleness_p{share}": _percentile(counts, share / 100) for share in shares}
    return row | {f"{name}_staleness_max": len(counts) - 1}


def _head_coverage(records: Records, contributing: npt.NDArray[np.bool_]) -> float:
    """Return the share of rollouts whose first sampled token in the loss contributes."""
    starts = records.rollout_starts
    ends = np.append(starts[1:], len(contributing))
    in_loss = np.append(np.flatnonzero(records.columns.loss), len(contributing))  # the end stands for "none"
    first = in_loss[np.searchsorted(in_loss, starts)]
    covered = contributing[first[first < ends]]
    return float(np.count_nonzero(covered) / len(starts))


def metrics_row(records: Records, contributing: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Return the row of a batch; `contributing` bool (n) says which tokens train, at least one. Counts cover the whole record.

    `masked_tokens` are in the loss as sampled and do not contribute; `trainable_share` is the share of those in the loss that do. Head
    staleness is that of a trained rollout's oldest contributing token.
    """
    batch, rollouts, columns = records.batch, records.rollouts, records.columns
    rewards = np.array([rollout.reward for rollout in rollouts], np.float64)
    named: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.rewards.items():
            if math.isfinite(value):
                named.setdefault(name, []).append(value)
    heads = np.minimum.reduceat(np.where(contributing, records.versions, _NEVER), records.rollout_starts)
    tokens = len(columns.token_ids)
    lengths = np.diff(records.rollout_starts, append=tokens)
    in_loss, trained_on = int(np.count_nonzero(columns.loss)), int(np.count_nonzero(contributing))
    return {
        "batch": batch.k,
        "time": time.time(),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        **{f"reward/{name}_mean": math.fsum(values) / len(values) for name, values in sorted(named.items())},
        **_staleness("head", batch.k - heads[heads < _NEVER], (99,)),
        **_staleness("token", batch.k - records.versions[contributing], (50, 95, 99)),
        "head_coverage": _head_coverage(records, contributing),
        "groups": len(batch.groups),
        "zero_advantage_groups": sum(group.zero_advantage for group in batch.groups),
        "rollouts": len(rollouts),
        "samples": len(records.tokens),
        "tokens": tokens,
        "contributing_tokens": trained_on,
        "masked_tokens": in_loss - trained_on,
        "trainable_share": trained_on / in_loss,
        "truncated_share": sum(rollout.finish != "stop" for rollout in rollouts) / len(rollouts),
        "rollout_tokens_mean": float(lengths.mean()),
        "rollout_tokens_max": int(lengths.max()),
    }
