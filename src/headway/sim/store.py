"""The simulated batch store: it keeps what each batch was, asserts the bound by its own arithmetic, and measures staleness token by token.

It reads the stamps from `metadata["spans"]` of the rollouts' headers (see `sim.worker`) and never opens a payload.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway.errors import BoundBreached
from headway.flow.take_up import StoredBatch
from headway.formats.batch_staleness import Spans, staleness_figures
from headway.types import Batch, OnStale

Ints: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]


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
        told = _stretches(batch)
        kept = _kept(batch, told, self.lineage)
        if self._write_seconds:
            await asyncio.sleep(self._write_seconds)
        self.batches[batch.k] = kept
        row = self.rows[batch.k] = _row(batch, kept, told)
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


class _Stretches(NamedTuple):
    """The sampled tokens of a batch in m stretches of one rollout and one version each, in token order. Of n rollouts; int64 and bool.

    `rollout`: whose each is, `first` (n): where those of each begin. `out` (m): kept out of the loss. One that is not `live` (n) has no
    version: all of it counts as of version k.
    """

    rollout: Ints
    version: Ints
    tokens: Ints
    out: Flags
    first: Ints
    live: Flags


def _stretches(batch: Batch) -> _Stretches:
    spans: list[tuple[int, int]] = []
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    first = []
    for rollout in rollouts:
        first.append(len(spans))
        spans.extend(rollout.metadata["spans"] if rollout.source == "live" else [(0, batch.k)])
    starts = np.array(first, np.int64)
    begin, version = np.array(spans, np.int64).T
    end = np.append(begin[1:], 0)
    end[np.append(starts[1:], len(spans)) - 1] = [rollout.sampled_tokens for rollout in rollouts]
    whose = np.repeat(np.arange(len(rollouts)), np.diff(starts, append=len(spans)))
    out = np.array([(rollout.group, rollout.member) in batch.overlong_masked for rollout in rollouts], np.bool_)[whose]
    if batch.on_stale == "mask":
        out |= batch.k - version > batch.max_staleness
    live = np.array([rollout.source == "live" for rollout in rollouts], np.bool_)
    return _Stretches(whose, version, end - begin, out, starts, live)


def keep(batch: Batch, lineage: str = "") -> KeptBatch:
    """Measure a batch; raises BoundBreached for a token from the future, one that trains past the bound, or a group with none that may."""
    return _kept(batch, _stretches(batch), lineage)


def _kept(batch: Batch, told: _Stretches, lineage: str) -> KeptBatch:
    k, bound, rollouts = batch.k, batch.max_staleness, [rollout for group in batch.groups for rollout in group.rollouts]
    staleness, live = k - told.version, told.live[told.rollout]
    if (early := staleness < 0).any():
        raise BoundBreached(f"batch {k} holds a token of version {told.version[early][0]}, which does not exist yet")
    trains, masked = live & ~told.out, live & told.out
    oldest = np.full(len(rollouts), -1)
    np.maximum.at(oldest, told.rollout[trains], staleness[trains])
    contributes, covered = oldest >= 0, trains[told.first]
    group = np.repeat(np.arange(len(batch.groups)), [len(group.rollouts) for group in batch.groups])
    barren = np.bincount(group, contributes | ~told.live, len(batch.groups)) == 0
    if barren.any() and not batch.overlong_masked:
        raise BoundBreached(
            f"batch {k} holds group {batch.groups[int(barren.argmax())].admission.group}, which has no token that may train"
        )
    tokens = _counted(staleness[trains], told.tokens[trains])
    stalest = max(tokens, default=0)
    if batch.on_stale != "train" and stalest > bound:
        raise BoundBreached(f"batch {k} holds a contributing token of version {k - stalest}: max_staleness is {bound}")
    contributing = np.bincount(told.rollout[trains], told.tokens[trains], len(rollouts)).astype(np.int64)
    sampled = np.add.reduceat(told.tokens, told.first)
    return KeptBatch(
        k=k,
        groups=tuple(group.admission.group for group in batch.groups),
        births=tuple(group.admission.birth for group in batch.groups),
        rollouts=len(rollouts),
        max_staleness=bound,
        on_stale=batch.on_stale,
        oldest_contributing=k - stalest if tokens else None,
        tokens=tokens,
        masked=_counted(staleness[masked], told.tokens[masked]),
        heads=_counted(oldest[contributes], np.ones(int(contributes.sum()), np.int64)),
        whole_heads=int(covered.sum()),
        newest=max((rollout.tail for rollout in rollouts if rollout.source == "live"), default=-1),
        lineage=lineage,
        positions=sum([rollout.tokens for rollout in rollouts]),
        shares=list(zip(*(of_each[told.live].tolist() for of_each in (sampled, contributing, covered)), strict=True)),
    )


def _counted(staleness: Ints, weights: Ints) -> dict[int, int]:
    """Return how much there is of each staleness, where there is any."""
    return {value: int(weight) for value, weight in enumerate(np.bincount(staleness, weights).tolist()) if weight}


def _row(batch: Batch, kept: KeptBatch, told: _Stretches) -> dict[str, Any]:
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    mean = sum(rewards) / len(rewards)
    members = sum(group.admission.members for group in batch.groups)
    spans = Spans(told.rollout, told.version, told.tokens, told.tokens, told.tokens * ~told.out)  # as sampled, all are in the loss
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
        "tokens": kept.positions,
        "contributing_tokens": contributing,
        "masked_tokens": sampled - contributing,
        "trainable_share": contributing / sampled,
        "rollout_tokens_mean": kept.positions / len(rollouts),
        "rollout_tokens_max": max(rollout.tokens for rollout in rollouts),
    }
