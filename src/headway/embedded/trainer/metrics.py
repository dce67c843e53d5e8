"""What one trainer step measured, as plain JSON numbers.

Figures against the behaviour policy use the weights of version k, the ones the step started from, on the tokens scored under them: all
contributing tokens with `decoupled_ppo` (it needs them), those of the first minibatch with the other losses.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.embedded.trainer.packing import Ints

Floats = npt.NDArray[np.float32]

_BUCKETS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, None))
_LOG_RATIO_LIMIT = 20.0


def against_behaviour(start: Floats, behaviour: Floats, staleness: Ints) -> dict[str, Any]:
    """Compare the starting weights with who sampled; `start` float32 (c) is NaN for tokens not scored under the starting weights.

    `mismatch_kl` estimates KL(engine || trainer) on tokens of staleness 0 (the same weights: it shows how far two implementations differ)
    by the k3 estimator, the mean of r - 1 - log r with r = trainer / engine: never negative, low variance (J. Schulman, "Approximating KL
    divergence", 2020). `ess`: the effective share of tokens, (sum w)^2 / (n sum w^2) for w = r (Kish). None: no such token.
    """
    known = np.isfinite(start)
    log_ratio = np.clip(start[known].astype(np.float64) - behaviour[known], -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    behind = staleness[known]
    ratio = np.exp(log_ratio)
    fresh = behind == 0
    return {
        "mismatch_kl": float(np.mean(ratio[fresh] - 1 - log_ratio[fresh])) if fresh.any() else None,
        **_weights(ratio),
        "by_staleness": {
            _name(low, high): {"tokens": int(inside.sum()), **_weights(ratio[inside])}
            for low, high in _BUCKETS
            if (inside := (behind >= low) & (behind <= (math.inf if high is None else high))).any()
        },
    }


def _weights(ratio: npt.NDArray[np.float64]) -> dict[str, float | None]:
    if not len(ratio):
        return {"ratio_mean": None, "ratio_max": None, "ess": None}
    return {
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "ess": float(ratio.sum() ** 2 / (len(ratio) * np.square(ratio).sum())),
    }


def _name(low: int, high: int | None) -> str:
    return f"{low}+" if high is None else str(low) if low == high else f"{low}-{high}"
