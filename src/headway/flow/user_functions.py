"""Functions of the user's that judge rewards: called with care, and their answers checked."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from headway.errors import ConfigError, EnvironmentFailed, HeadwayError

Result = TypeVar("Result")

Advantages = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
"""The advantages of a group's members, from their rewards; both float64 (members)."""


def called(key: str, function: Callable[[Any], Result], rewards: Any) -> Result:
    """Call a function of the user's; what it raises ends the run in one line, its traceback below."""
    try:
        return function(rewards)
    except HeadwayError:
        raise
    except Exception as error:
        detail = "".join(traceback.format_exception(error))
        raise EnvironmentFailed(
            f"{key} raised {type(error).__name__} for the rewards {[float(reward) for reward in rewards]}: {error}", detail=detail
        ) from error


def checked_advantages(function: Advantages, rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the advantages for these rewards, float64 (members). Raises ConfigError unless there is one finite number for each."""
    advantages = np.asarray(called("rollout.advantage", function, rewards), dtype=np.float64)
    if advantages.shape != rewards.shape or not all(map(math.isfinite, advantages.tolist())):  # np.isfinite takes longer for so few
        raise ConfigError(
            f"rollout.advantage: for the rewards {rewards.tolist()} it returned "
            f"{advantages.tolist()}: one finite number per reward is needed"
        )
    return advantages
