"""How often Python looks for cyclic garbage while a run is played: seldom, as there is next to none, and much that is alive.

A rollout in flight is some fifty objects, and a full collection looks at all of them: with 100,000 in flight that took more time than the
run itself. What is left behind in cycles is of tasks that were cancelled, and is found as memory grows.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 1_000_000  # new objects, more than were freed, before the youngest are looked at; some 100 MB. Python's own: 700, 10 and 10
_OLDER = 2  # such looks before those that outlived one are looked at, and such looks in turn before all are


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Within the block look for cyclic garbage only after many new objects; no effect on whoever has switched that off."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], _YOUNG), max(before[1], _OLDER), max(before[2], _OLDER))
    try:
        yield
    finally:
        gc.set_threshold(*before)
