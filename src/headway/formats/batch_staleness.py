"""How stale a batch is, and where its sampled tokens went: the part of a batch's metrics row that is about versions.

Only live rollouts count in any of it: what was replayed or came from outside has no version of this run. Staleness is `k - version` of a
contributing token. It splits at its group's `ready_version`, the version that was served when the group became ready:

    in flight = max(0, ready_version - version)        queued = k - max(version, ready_version)

A rollout is covered when its first sampled token in the loss contributes. Counted are rollouts that have such a token and that
`overlong = "mask"` did not keep out: those are out whatever their age.

Percentiles are nearest-rank over whole versions: the smallest staleness that at least that share is at or below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.types import Batch, Rollout

LENGTH_CLASSES = 10

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The sampled tokens of a batch in m stretches, each of one rollout and one version, in token order. All int64 (m).

    `rollout`: its place among the batch's rollouts; `sampled`, `in_loss` and `contributing` count tokens. Of the tokens in the loss of one
    stretch all contribute or none.
    """

    rollout: Counts
    version: Counts
    sampled: Counts
    in_loss: Counts
    contributing: Counts

    def where(self, chosen: npt.NDArray[np.bool_]) -> Spans:
        """Return the stretches that are `chosen`, bool (m)."""
        return Spans(self.rollout[chosen], self.version[chosen], self.sampled[chosen], self.in_loss[chosen], self.contributing[chosen])


def staleness_figures(batch: Batch, spans: Spans) -> dict[str, Any]:
    """Return the keys of a metrics row that tell how stale a batch is; null where there is nothing to take a mean of."""
    rollouts = tuple(rollout for group in batch.groups for rollout in group.rollouts)
    live = np.array([rollout.source == "live" for rollout in rollouts])
    overlong = np.array([(rollout.group, rollout.member) in batch.overlong_masked for rollout in rollouts])
    replayed = spans.where(~live[spans.rollout])
    spans = spans.where(live[spans.rollout])
    contributing = spans.where(spans.contributing > 0)
    masked = spans.where((spans.in_loss > 0) & (spans.contributing == 0) & ~overlong[spans.rollout])
    tokens = _counted(batch.k - contributing.version, contributing.contributing)
    over = int(tokens[batch.max_staleness + 1 :].sum())
    return {
        **_summary("head", heads := _heads(batch.k, contributing), (99,)),
        "head_staleness_histogram": heads.tolist(),
        **_summary("token", tokens, (50, 95, 99)),
        "token_staleness_histogram": tokens.tolist(),
        "masked_staleness_histogram": {
            str(staleness): count for staleness, count in enumerate(_counted(batch.k - masked.version, masked.in_loss).tolist()) if count
        },
        **_where_it_grew(batch, contributing),
        "share_over_bound": over / max(1, int(tokens.sum())),
        **_coverage(rollouts, spans, overlong),
        "token_fates": _fates(batch, spans, overlong, masked),
        "replayed_groups": sum(any(rollout.source != "live" for rollout in group.rollouts) for group in batch.groups),
        "replayed_tokens": int(replayed.contributing.sum()),
    }


def _counted(staleness: Counts, tokens: Counts) -> Counts:
    """Return how many tokens have staleness 0, 1, ..."""
    return np.bincount(staleness, tokens).astype(np.int64)


def _percentile(counts: Counts, share: float) -> int:
    cumulative = counts.cumsum()
    return int(np.searchsorted(cumulative, math.ceil(share * int(cumulative[-1]))))


def _summary(name: str, counts: Counts, shares: tuple[int, ...]) -> dict[str, float | None]:
    total = int(counts.sum())
    keys = [f"{name}_staleness_{figure}" for figure in ("mean", *(f"p{share}" for share in shares), "max")]
    if not total:
        return dict.fromkeys(keys)
    mean = float(counts @ np.arange(len(counts)) / total)
    return dict(zip(keys, [mean, *(_percentile(counts, share / 100) for share in shares), len(counts) - 1], strict=True))


def _heads(k: int, contributing: Spans) -> Counts:
    """Return how many rollouts have head staleness 0, 1, ...: that of a rollout's oldest contributing token."""
    oldest: dict[int, int] = {}
    for rollout, version in zip(contributing.rollout.tolist(), contributing.version.tolist(), strict=True):
        oldest[rollout] = min(version, oldest.get(rollout, version))
    return np.bincount([k - version for version in oldest.values()]) if oldest else np.zeros(0, np.int64)


def _where_it_grew(batch: Batch, contributing: Spans) -> dict[str, float | None]:
    """Return the mean staleness that contributing tokens grew in flight, and while their groups waited for a batch."""
    total = int(contributing.contributing.sum())
    if not total:
        return {"staleness_in_flight_mean": None, "staleness_queued_mean": None}
    ready = np.array([group.ready_version for group in batch.groups for _ in group.rollouts], np.int64)[contributing.rollout]
    in_flight = int(np.maximum(0, ready - contributing.version) @ contributing.contributing)
    queued = int((batch.k - np.maximum(contributing.version, ready)) @ contributing.contributing)
    return {"staleness_in_flight_mean": in_flight / total, "staleness_queued_mean": queued / total}


def _coverage(rollouts: tuple[Rollout, ...], spans: Spans, overlong: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Return head coverage in all, per environment, and per environment and length class."""
    in_loss = spans.where((spans.in_loss > 0) & ~overlong[spans.rollout])
    rows, first = np.unique(in_loss.rollout, return_index=True)
    covered = in_loss.contributing[first] > 0
    lengths = np.bincount(spans.rollout, spans.sampled, len(rollouts)).astype(np.int64)[rows]
    environments = np.array([rollouts[row].environment for row in rows.tolist()])
    by_environment = {str(name): environments == name for name in sorted(set(environments.tolist()))}
    return {
        "head_coverage": float(covered.mean()) if len(rows) else None,
        "rollouts_by_environment": {name: int(np.count_nonzero(here)) for name, here in by_environment.items()},
        "head_coverage_by_environment": {name: float(covered[here].mean()) for name, here in by_environment.items()},
        "head_coverage_by_length": {name: coverage_by_length(lengths[here], covered[here]) for name, here in by_environment.items()},
    }


def length_classes(rollouts: int) -> Counts:
    """Return the class, 0 (shortest tenth) to 9, of each of so many rollouts ordered by length: with fewer than 10, some stay empty."""
    return ((2 * np.arange(rollouts) + 1) * LENGTH_CLASSES) // (2 * max(1, rollouts))


def coverage_by_length(lengths: Counts, covered: npt.NDArray[np.bool_]) -> list[float | None]:
    """Return the head coverage of each tenth of the rollouts by length, shortest first; None where a tenth holds no rollout.

    Rollouts of equal length share their coverage, so that it does not matter in which order they stand.
    """
    _, alike = np.unique(lengths, return_inverse=True)
    shared = (np.bincount(alike, covered) / np.bincount(alike))[np.sort(alike)]
    classes = length_classes(len(lengths))
    return [float(shared[classes == number].mean()) if (classes == number).any() else None for number in range(LENGTH_CLASSES)]


def _fates(batch: Batch, spans: Spans, overlong: npt.NDArray[np.bool_], masked: Spans) -> dict[str, int]:
    """Return where each sampled token of the live rollouts went. `zero_advantage`: in the loss, and its whole group scored alike."""
    alike = np.array([group.zero_advantage for group in batch.groups for _ in group.rollouts])[spans.rollout]
    out = overlong[spans.rollout]
    return {
        "trained": int(spans.contributing[~alike].sum()),
        "masked": int(masked.in_loss.sum()),
        "zero_advantage": int(spans.contributing[alike].sum()),
        "over_length": int(spans.in_loss[out].sum()),
        "not_in_loss": int((spans.sampled - spans.in_loss).sum()),
    }
