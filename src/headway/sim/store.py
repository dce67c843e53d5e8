"""The simulated batch store: it keeps what each batch was, asserts the bound by its own arithmetic, and measures staleness token by token.

It reads the stamps from `metadata["spans"]` of the rollouts' headers (see `sim.worker`) and never opens a payload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headway.errors import BoundBreached
from headway.types import Batch, OnStale, Rollout


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """What a batch was; `oldest_contributing` is a version.

    `tokens` / `masked`: contributing / masked tokens by their staleness; `heads`: contributing rollouts by head staleness.
    """

    k: int
    groups: tuple[int, ...]
    births: tuple[int, ...]
    rollouts: int
    max_staleness: int
    on_stale: OnStale
    oldest_contributing: int | None
    tokens: Mapping[int, int]
    masked: Mapping[int, int]
    heads: Mapping[int, int]
    whole_heads: int  # rollouts whose first sampled token contributes

    @property
    def max_seen(self) -> int:
        """The largest staleness of a contributing token; 0 when none contributes."""
        return max(self.tokens, default=0)


class SimBatchStore:
    """`protocols.BatchStore` in memory. `batches`: what was written, by id; `whole` keeps the batches themselves in `written` too."""

    def __init__(self, *, whole: bool = False) -> None:
        self.batches: dict[int, KeptBatch] = {}
        self.written: dict[int, Batch] = {}
        self._whole = whole

    async def write(self, batch: Batch) -> Mapping[str, Any]:
        """Keep the batch and return its metrics row; raises BoundBreached."""
        kept = keep(batch)
        self.batches[batch.k] = kept
        if self._whole:
            self.written[batch.k] = batch
        return _row(batch, kept)


def keep(batch: Batch) -> KeptBatch:
    """Measure a batch; raises BoundBreached for a token from the future, one that trains past the bound, or a group with none that may."""
    k, bound = batch.k, batch.max_staleness
    tokens: Counter[int] = Counter()
    masked: Counter[int] = Counter()
    heads: Counter[int] = Counter()
    whole_heads = 0
    for group in batch.groups:
        contributed = False
        for rollout in group.rollouts:
            overlong = (rollout.group, rollout.member) in batch.overlong_masked
            oldest = -1
            for number, (version, count) in enumerate(_spans(rollout)):
                staleness = k - version
                if staleness < 0:
                    raise BoundBreached(f"batch {k} holds a token of version {version}, which does not exist yet")
                if overlong or (batch.on_stale == "mask" and staleness > bound):
                    masked[staleness] += count
                    continue
                tokens[staleness] += count
                oldest = max(oldest, staleness)
                whole_heads += number == 0
            contributed |= oldest >= 0
            if oldest >= 0:
                heads[oldest] += 1
        if not contributed and not batch.overlong_masked:
            raise BoundBreached(f"batch {k} holds group {group.admission.group}, which has no token that may train")
    stalest = max(tokens, default=0)
    if batch.on_stale != "train" and stalest > bound:
        raise BoundBreached(f"batch {k} holds a contributing token of version {k - stalest}: max_staleness is {bound}")
    return KeptBatch(
        k=k,
        groups=tuple(group.admission.group for group in batch.groups),
        births=tuple(group.admission.birth for group in batch.groups),
        rollouts=sum(len(group.rollouts) for group in batch.groups),
        max_staleness=bound,
        on_stale=batch.on_stale,
        oldest_contributing=k - stalest if tokens else None,
        tokens=tokens,
        masked=masked,
        heads=heads,
        whole_heads=whole_heads,
    )


def _spans(rollout: Rollout) -> Iterator[tuple[int, int]]:
    """Yield (version, sampled tokens) of each span."""
    spans = rollout.metadata["spans"]
    for index, (first, version) in enumerate(spans):
        end = spans[index + 1][0] if index + 1 < len(spans) else rollout.sampled_tokens
        yield version, end - first


def _row(batch: Batch, kept: KeptBatch) -> dict[str, Any]:
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    mean = sum(rewards) / len(rewards)
    contributing, masked = sum(kept.tokens.values()), sum(kept.masked.values())
    return {
        "batch": kept.k,
        "reward_mean": mean,
        "reward_std": (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5,
        **{f"head_staleness_{name}": value for name, value in _summary(kept.heads).items() if name in {"mean", "p99", "max"}},
        **{f"token_staleness_{name}": value for name, value in _summary(kept.tokens).items()},
        "head_coverage": kept.whole_heads / kept.rollouts,
        "groups": len(kept.groups),
        "rollouts": kept.rollouts,
        "samples": sum(rollout.samples for rollout in rollouts),
        "tokens": sum(rollout.tokens for rollout in rollouts),
        "contributing_tokens": contributing,
        "masked_tokens": masked,
        "trainable_share": contributing / max(1, contributing + masked),
        "rollout_tokens_mean": sum(rollout.tokens for rollout in rollouts) / len(rollouts),
        "rollout_tokens_max": max(rollout.tokens for rollout in rollouts),
    }


def _summary(counts: Mapping[int, int]) -> dict[str, float | None]:
    """Return mean, p50, p95, p99 and max of values with counts (the smallest value with at least that share at or below it)."""
    total = sum(counts.values())
    if not total:
        return dict.fromkeys(("mean", "p50", "p95", "p99", "max"))
    ordered = sorted(counts.items())

    def quantile(share: float) -> int:
        below = 0
        for value, count in ordered:
            below += count
            if below >= share * total:
                return value
        return ordered[-1][0]

    return {
        "mean": sum(value * count for value, count in ordered) / total,
        "p50": quantile(0.5),
        "p95": quantile(0.95),
        "p99": quantile(0.99),
        "max": ordered[-1][0],
    }
