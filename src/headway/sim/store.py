"""The simulated batch store: it keeps what each batch was, asserts the bound by its own arithmetic, and measures staleness token by token.

It reads the stamps from `metadata["spans"]` of the rollouts' headers (see `sim.worker`) and never opens a payload.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.errors import BoundBreached
from headway.flow.take_up import StoredBatch
from headway.formats.batch_staleness import Spans, staleness_figures
from headway.types import Batch, OnStale, Rollout


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """What a batch was; `oldest_contributing` and `newest` are versions (-1: it holds no live rollout).

    Of live rollouts: `tokens` / `masked` count contributing / masked tokens by staleness, `heads` contributing rollouts by head staleness;
    `shares` has, of each, its sampled and its contributing tokens, and whether the first one contributes. `positions`: tokens of all kinds.
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
    newest: int = -1
    lineage: str = ""
    positions: int = 0
    shares: Sequence[tuple[int, int, bool]] = ()

    @property
    def max_seen(self) -> int:
        """The largest staleness of a contributing token; 0 when none contributes."""
        return max(self.tokens, default=0)


class SimBatchStore:
    """`protocols.BatchStore` in memory. `batches`: what was written, by id; `whole` keeps the batches themselves in `written` too.

    `rows` are their metrics. `lineage` is whose batches they are. `keep`: how many batches are remembered, the newest (0: all).
    """

    def __init__(self, *, whole: bool = False, lineage: str = "", write_seconds: float = 0.0, keep: int = 0) -> None:
        self.batches: dict[int, KeptBatch] = {}
        self.written: dict[int, Batch] = {}
        self.rows: dict[int, Mapping[str, Any]] = {}
        self.lineage = lineage
        self._whole = whole
        self._write_seconds = write_seconds
        self._keep = keep

    async def write(self, batch: Batch) -> Mapping[str, Any]:
        """Keep the batch and return its metrics row; raises BoundBreached."""
        kept = keep(batch, self.lineage)
        if self._write_seconds:
            await asyncio.sleep(self._write_seconds)
        self.batches[batch.k] = kept
        row = self.rows[batch.k] = _row(batch, kept)
        if self._whole:
            self.written[batch.k] = batch
        if self._keep:
            self.remove(range(min(self.batches), batch.k + 1 - self._keep))
        return row

    def stored(self, k: int) -> StoredBatch | None:
        """Return what lies there of batch k; None: no whole batch."""
        kept = self.batches.get(k)
        if kept is None:
            return None
        return StoredBatch(lineage=kept.lineage, max_staleness=kept.max_staleness, on_stale=kept.on_stale, row=self.rows[k])

    def remove(self, batches: Iterable[int]) -> None:
        """Forget batches."""
        for k in batches:
            for kept in (self.batches, self.written, self.rows):
                kept.pop(k, None)


def keep(batch: Batch, lineage: str = "") -> KeptBatch:
    """Measure a batch; raises BoundBreached for a token from the future, one that trains past the bound, or a group with none that may."""
    k, bound = batch.k, batch.max_staleness
    tokens: Counter[int] = Counter()
    masked: Counter[int] = Counter()
    heads: Counter[int] = Counter()
    whole_heads = positions = 0
    shares: list[tuple[int, int, bool]] = []
    for group in batch.groups:
        contributed = False
        for rollout in group.rollouts:
            positions += rollout.tokens
            if rollout.source != "live":  # outside of the bound, and of what is counted here
                contributed = True
                continue
            overlong = (rollout.group, rollout.member) in batch.overlong_masked
            oldest, contributing, covered = -1, 0, False
            for number, (version, count) in enumerate(_spans(rollout)):
                staleness = k - version
                if staleness < 0:
                    raise BoundBreached(f"batch {k} holds a token of version {version}, which does not exist yet")
                if overlong or (batch.on_stale == "mask" and staleness > bound):
                    masked[staleness] += count
                    continue
                tokens[staleness] += count
                oldest = max(oldest, staleness)
                contributing += count
                covered |= number == 0
            whole_heads += covered
            shares.append((rollout.sampled_tokens, contributing, covered))
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
        newest=max((rollout.tail for group in batch.groups for rollout in group.rollouts if rollout.source == "live"), default=-1),
        lineage=lineage,
        positions=positions,
        shares=shares,
    )


def _spans(rollout: Rollout) -> Iterator[tuple[int, int]]:
    """Yield (version, sampled tokens) of each span."""
    spans = rollout.metadata["spans"]
    for index, (first, version) in enumerate(spans):
        end = spans[index + 1][0] if index + 1 < len(spans) else rollout.sampled_tokens
        yield version, end - first


def _version_spans(batch: Batch) -> Spans:
    """Return the batch's sampled tokens by their stamps; all of them are in the loss as sampled, and replayed ones have no version."""
    rows: list[tuple[int, int, int, int]] = []
    rollouts = (rollout for group in batch.groups for rollout in group.rollouts)
    for row, rollout in enumerate(rollouts):
        live, out = rollout.source == "live", (rollout.group, rollout.member) in batch.overlong_masked
        for version, count in _spans(rollout) if live else [(batch.k, rollout.sampled_tokens)]:
            trains = not out and not (batch.on_stale == "mask" and batch.k - version > batch.max_staleness)
            rows.append((row, version, count, count * trains))
    rollout_, version_, sampled, contributing = np.array(rows, np.int64).T
    return Spans(rollout_, version_, sampled, sampled, contributing)


def _row(batch: Batch, kept: KeptBatch) -> dict[str, Any]:
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    mean = sum(rewards) / len(rewards)
    members = sum(group.admission.members for group in batch.groups)
    spans = _version_spans(batch)
    contributing, sampled = int(spans.contributing.sum()), int(spans.sampled.sum())
    return {
        "batch": kept.k,
        "reward_mean": mean,
        "reward_std": (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5,
        "reward_mean_all": sum(rewards) / members,
        **staleness_figures(batch, spans),
        "groups": len(kept.groups),
        "zero_advantage_groups": sum(group.zero_advantage for group in batch.groups),
        "rollouts": kept.rollouts,
        "lost_rollouts": members - kept.rollouts,
        "lost_share": (members - kept.rollouts) / members,
        "samples": sum(rollout.samples for rollout in rollouts),
        "tokens": sum(rollout.tokens for rollout in rollouts),
        "contributing_tokens": contributing,
        "masked_tokens": sampled - contributing,
        "trainable_share": contributing / sampled,
        "rollout_tokens_mean": sum(rollout.tokens for rollout in rollouts) / len(rollouts),
        "rollout_tokens_max": max(rollout.tokens for rollout in rollouts),
    }
