"""Whether a process has ended: asked at any moment, also at the one in which it ends."""

from __future__ import annotations

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Whether it has; one that nobody has waited for yet has, too."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two questions
        return True


def is_gone(pid: int) -> bool:
    """Whether nobody has this number any more, or only one that nobody has waited for."""
    try:
        return has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True
