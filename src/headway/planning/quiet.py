"""Simulated runs log like real ones, in virtual time and to nobody's use: reports say what there is to say."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quietly() -> Iterator[None]:
    """Let headway log nothing inside."""
    logger = logging.getLogger("headway")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
