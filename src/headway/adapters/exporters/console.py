"""The progress line: live on a terminal, otherwise a plain line every few seconds.

Rows are drawn by a thread of its own: a terminal that stands still (Ctrl-S, a full pipe) never stalls the run, and a stream that fails is
left alone from then on. The newest row wins; rows that nobody could see are dropped.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any, Literal, TextIO

PLAIN_SECONDS = 5.0
_CLOSE_SECONDS = 2.0
_ROWS_WAITING = 256


class ConsoleExporter:
    """Shows "pipeline" rows as progress and "eval" rows as lines that stay. `mode` "auto" is live where `stream` is a terminal."""

    def __init__(self, mode: Literal["auto", "plain", "none"], stream: TextIO) -> None:
        self._rows: queue.Queue[tuple[str, Mapping[str, Any]] | None] = queue.Queue(_ROWS_WAITING)
        self._thread: threading.Thread | None = None
        if mode != "none":
            live = mode == "auto" and stream.isatty() and os.environ.get("TERM") != "dumb"
            self._thread = threading.Thread(target=self._draw, args=(stream, live), name="progress", daemon=True)
            self._thread.start()

    def export(self, stream: str, row: Mapping[str, Any]) -> None:
        """Show a row of the streams "pipeline" and "eval"; others pass by."""
        if self._thread is not None and stream in {"pipeline", "eval"} and not self._rows.full():
            self._rows.put_nowait((stream, row))

    def close(self) -> None:
        """Show the last row and leave the terminal as it was; idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if not self._rows.full():
            self._rows.put_nowait(None)
            thread.join(_CLOSE_SECONDS)

    def _draw(self, stream: TextIO, live: bool) -> None:  # noqa: FBT001 - the thread's own entry
        with suppress(Exception), closing(LiveScreen(stream) if live else PlainScreen(stream)) as screen:
            newest: Mapping[str, Any] | None = None
            while (item := self._rows.get()) is not None:
                name, row = item
                if name == "eval":
                    screen.line(eval_line(row))
                else:
                    newest = row
                if newest is not None and self._rows.empty():
                    screen.progress(progress_line(newest), _number(newest.get("time")))
                    newest = None
            if newest is not None:
                screen.progress(progress_line(newest), _number(newest.get("time")))


class PlainScreen:
    """A line at most every PLAIN_SECONDS, by the rows' own clock; the last one always."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._held: str | None = None
        self._shown_at = -math.inf

    def progress(self, text: str, time: float) -> None:
        """Show how things stand at `time` (Unix seconds)."""
        self._held = text
        if time - self._shown_at >= PLAIN_SECONDS:
            self._shown_at = time
            self.line(text)

    def line(self, text: str) -> None:
        """Show a line that stays."""
        self._held = None if text == self._held else self._held
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Show what was held back."""
        if self._held is not None:
            self.line(self._held)


class LiveScreen:
    """One line that is redrawn in place; what others print appears above it."""

    def __init__(self, stream: TextIO) -> None:
        # Imported only where there is a terminal: a tenth of a second of start-up.
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._text = Text
        self._console = Console(file=stream)
        self._live = Live(Text(""), console=self._console, auto_refresh=False)
        self._live.start()

    def progress(self, text: str, time: float) -> None:
        """Show how things stand at `time` (Unix seconds)."""
        self._live.update(self._text(text), refresh=True)

    def line(self, text: str) -> None:
        """Show a line that stays, above the progress line."""
        self._console.print(self._text(text))

    def close(self) -> None:
        """Leave the last line where it is, and the cursor below it."""
        self._live.stop()


def progress_line(row: Mapping[str, Any]) -> str:
    """Return a row of the pipeline stream as one line; what a row lacks is shown as `-`."""
    capacity = _whole(row.get("capacity"))
    reason = row.get("capacity_reason")
    parts = [
        f"batch {_whole(row.get('batch'))}/{_whole(row.get('steps'))}",
        f"version {_whole(row.get('version'))}",
        f"reward {_decimal(row.get('reward_mean'))}",
        f"head staleness p99 {_whole(row.get('head_staleness_p99'))} max {_whole(row.get('head_staleness_max'))}",
        f"in flight {_whole(row.get('rollouts_in_flight'))} ({_whole(row.get('groups_running'))} groups)",
        f"ready {_whole(row.get('groups_ready'))}",
        f"capacity {capacity}" + (f" ({reason})" if reason else ""),
        f"{_short(row.get('tokens_per_second'))} tok/s",
    ]
    if row.get("eval_in_flight"):
        parts.append(f"eval {_whole(row['eval_in_flight'])} in flight")
    if row.get("trainer_waits_for"):
        parts.append(f"trainer waits for {row['trainer_waits_for']}")
    return " · ".join(parts)


def eval_line(row: Mapping[str, Any]) -> str:
    """Return a row of the eval stream as one line."""
    mixed = " · mixed versions" if row.get("mixed") else ""
    counts = f"{_whole(row.get('ok'))} ok, {_whole(row.get('failed'))} failed"
    return f"eval of version {_whole(row.get('version'))}: reward {_decimal(row.get('reward_mean'))} · {counts}{mixed}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _whole(value: Any) -> str:
    number = _number(value)
    return f"{number:.0f}" if math.isfinite(number) else "-"


def _decimal(value: Any) -> str:
    number = _number(value)
    return f"{number:.3f}" if math.isfinite(number) else "-"


def _short(value: Any) -> str:
    number = _number(value)
    if not math.isfinite(number):
        return "-"
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"
