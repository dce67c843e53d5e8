"""Python's garbage collector while much is made that stays: it would walk all of it again and again, and find nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Collect nothing within the block; what is there at its end is never walked again. It is freed as ever, unless it is a cycle."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
