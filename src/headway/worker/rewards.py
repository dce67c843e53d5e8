"""What counts as a reward: a finite number, and nothing that merely resembles one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def finite(value: Any) -> float | None:
    """Return a reward as a float, or None for what is none: no number (texts and booleans included), NaN, infinite."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
