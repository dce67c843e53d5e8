"""Where the tasks of an event loop wait, for people: in the cause of an end that is wedged, and of a simulation that stands still."""

from __future__ import annotations

import asyncio
from pathlib import PurePath
from typing import Any

_ASYNCIO = PurePath(asyncio.__file__).parent


def place_of(task: asyncio.Task[Any]) -> str:
    """Return where a task waits: file, line and function of the innermost coroutine that is not asyncio's own. From any thread."""
    place = "not started"
    inner: Any = task.get_coro()
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None) or getattr(inner, "ag_frame", None)
        if frame is not None and PurePath(frame.f_code.co_filename).parent != _ASYNCIO:
            place = f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None) or getattr(inner, "ag_await", None)
    return place
