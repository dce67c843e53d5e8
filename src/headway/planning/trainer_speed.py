"""How long a trainer takes for a batch, told from when batches were formed and acknowledged, and how that depends on their tokens.

Of a batch that waited for the one before only the time after that one counts. Whether bigger batches take longer is told by a line of least
absolute deviations; where it explains little, the size is taken not to matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from headway.planning.observed import Trained

_FEWEST_FOR_A_LINE = 12
_WORTH_A_LINE = 0.25  # of the deviations, at least, must vanish
_STALL = 10.0  # times the median: no jitter of a trainer
_STEADY = 0.005  # a jitter below it is none


@dataclass(frozen=True, kw_only=True)
class Pace:
    """(seconds + tokens / tokens_per_second) x jitter, as a scenario says it; `stalls`: batches left out that took 10 times as long."""

    seconds: float
    tokens_per_second: float
    jitter: float
    stalls: int


def pace_of(trained: Sequence[Trained], tokens: Mapping[int, float]) -> Pace:
    """Return how fast the trainer is."""
    took = np.array([batch.seconds for batch in trained])
    sizes = np.array([tokens.get(batch.k, np.nan) for batch in trained])
    kept = took <= _STALL * max(float(np.median(took)), 1e-6)
    stalls = int((~kept).sum())
    took, sizes = took[kept], sizes[kept]
    slope = _slope(sizes, took)
    seconds = max(0.0, float(took.mean() - slope * sizes.mean())) if slope else float(took.mean())
    if slope and not seconds:
        slope = float(took.mean() / sizes.mean())
    expected = seconds + slope * sizes if slope else np.full(len(took), seconds)
    factors = [log(one / due) for one, due in zip(took, expected, strict=True) if one > 0 and due > 0]
    jitter = float(np.std(factors)) if len(factors) > 1 else 0.0
    return Pace(seconds=seconds, tokens_per_second=1 / slope if slope else 0.0, jitter=jitter if jitter > _STEADY else 0.0, stalls=stalls)


def _slope(sizes: np.ndarray[tuple[int], np.dtype[np.float64]], took: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Return seconds a token (Theil and Sen: the median over all pairs); 0.0: the size does not tell."""
    if len(took) < _FEWEST_FOR_A_LINE or np.isnan(sizes).any() or sizes.std() < 0.01 * sizes.mean():
        return 0.0
    first, second = np.triu_indices(min(len(took), 600), 1)
    apart = sizes[first] != sizes[second]
    slope = float(np.median((took[second] - took[first])[apart] / (sizes[second] - sizes[first])[apart]))
    if slope <= 0:
        return 0.0
    rest = took - slope * sizes
    before, after = np.abs(took - np.median(took)).mean(), np.abs(rest - np.median(rest)).mean()
    return slope if after < (1 - _WORTH_A_LINE) * before else 0.0
