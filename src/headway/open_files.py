"""How many files a process may have open: connections are files, and a run has one for every rollout in flight."""

from __future__ import annotations

import resource
from contextlib import suppress


def allow_many() -> None:
    """Raise this process's limit on open files as far as it may; shells give 1,024 and let it be raised. What it starts inherits that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS says "infinite" and takes less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
