"""The progress line, drawn on streams that are terminals, files, and broken."""

import io
from typing import Any

import pytest
import rich.console
import rich.live
import rich.text  # noqa: F401 -- here, and not in the thread that draws, whose time at the close is short

from headway.adapters.exporters.console import PLAIN_SECONDS, ConsoleExporter, LiveScreen, PlainScreen, eval_line, progress_line

ROW: dict[str, Any] = {
    "batch": 12,
    "steps": 200,
    "version": 11,
    "reward_mean": 0.4125,
    "head_staleness_p99": 1.0,
    "head_staleness_max": 2,
    "rollouts_in_flight": 64,
    "groups_running": 8,
    "groups_ready": 3,
    "capacity": 0,
    "capacity_reason": "staleness",
    "tokens_per_second": 5230.0,
    "trainer_waits_for": "rollouts",
    "eval_in_flight": 0,
    "time": 1000.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def shown(stream: io.StringIO, *rows: tuple[str, dict[str, Any]], mode: Any = "auto") -> list[str]:
    exporter = ConsoleExporter(mode, stream)
    for name, row in rows:
        exporter.export(name, row)
    exporter.close()
    return stream.getvalue().splitlines()


def test_the_line_says_where_the_run_is_and_what_holds_it_up() -> None:
    assert progress_line(ROW) == (
        "batch 12/200 · version 11 · reward 0.412 · head staleness p99 1 max 2 · in flight 64 (8 groups) · ready 3 · capacity 0 (staleness)"
        " · 5.2k tok/s · trainer waits for rollouts"
    )


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "text", [1]])
def test_a_row_of_nonsense_is_a_line_of_dashes(value: Any) -> None:
    line = progress_line(dict.fromkeys(ROW, value))
    assert line.startswith("batch -/- · version - · reward - ")
    assert progress_line({}).startswith("batch -/-")


def test_an_eval_is_a_line_of_its_own() -> None:
    row = {"version": 25, "reward_mean": 0.91, "ok": 99, "failed": 1, "mixed": True}
    assert eval_line(row) == "eval of version 25: reward 0.910 · 99 ok, 1 failed · mixed versions"
    assert shown(io.StringIO(), ("eval", row)) == [eval_line(row)]


def test_off_a_terminal_there_is_a_line_every_few_seconds_and_the_last_one() -> None:
    stream = io.StringIO()
    screen = PlainScreen(stream)
    for seconds in (0, 1, PLAIN_SECONDS, PLAIN_SECONDS + 1, PLAIN_SECONDS + 2):
        screen.progress(f"at {seconds:g}", 1000 + seconds)
    screen.close()
    screen.close()
    assert stream.getvalue().splitlines() == ["at 0", "at 5", "at 7"]


def test_on_a_terminal_the_line_is_redrawn_in_place() -> None:
    stream = Terminal()
    screen = LiveScreen(stream)
    screen.progress("first", 0)
    screen.line("stays")
    screen.progress("second", 0)
    screen.close()
    assert "\x1b[2K" in stream.getvalue()
    assert all(text in stream.getvalue() for text in ("first", "stays", "second"))


def test_the_last_row_is_always_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("pipeline", {**ROW, "batch": batch, "time": 1000 + 0.1 * batch}) for batch in range(100)]
    assert "batch 99/200" in shown(io.StringIO(), *rows)[-1]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    assert "batch 99/200" in "".join(shown(Terminal(), *rows)[-3:])


def test_a_dumb_terminal_and_the_plain_mode_get_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in "".join(shown(Terminal(), ("pipeline", ROW), mode="plain"))
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in "".join(shown(Terminal(), ("pipeline", ROW)))


def test_no_progress_means_none() -> None:
    assert shown(io.StringIO(), ("pipeline", ROW), mode="none") == []


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [Broken(), closed()], ids=["broken", "closed"])
def test_a_stream_that_fails_never_ends_the_run(stream: io.StringIO) -> None:
    exporter = ConsoleExporter("plain", stream)
    for batch in range(1000):
        exporter.export("pipeline", {**ROW, "batch": batch})
    exporter.close()
    exporter.close()
    exporter.export("pipeline", ROW)
