"""Invariants 6, 7 and 8: how a run behaved while it ran, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from headway.events import Finished, Resumed, RolloutDropped
from headway.testing.check.books import counted
from headway.testing.check.evidence import Evidence
from headway.testing.log import Entry

_CLOSED_AFTER_SECONDS = 0.05  # what a fake logs last may be logged a moment after its peer has gone on
_EXIT_CODES = {0, 1, 2, 3, 130, 143}


def concurrency(found: Evidence) -> Iterator[str]:
    """Rollouts in flight never exceed rollout.max_concurrent, training and evaluation together.

    By pipeline.jsonl at each interval; by the environment's log at every moment, an attempt being in flight from its reset to the first
    of: its close, its cancellation, its end in the journal, the death of the process that began it; by the engines' logs, which hold at
    most one request of an attempt.
    """
    most = found.setting("rollout.max_concurrent")
    if most is None:
        return
    for row in found.jsonl("pipeline.jsonl"):
        now = int(row.get("rollouts_in_flight") or 0) + int(row.get("eval_in_flight") or 0)
        if now > most:
            yield f"pipeline.jsonl: {now} rollouts in flight at {row.get('time')}, max_concurrent is {most}"
            break
    if found.environment_log is not None:
        peak, when = _peak(_attempts(found))
        if peak > most:
            yield f"{peak} attempts were under way in the environment at {when}, max_concurrent is {most}"
    if found.engine_logs is not None:
        spans = [(entry["arrived"], entry["time"]) for each in found.generations.values() for entry in each if not entry["disconnected"]]
        peak, when = _peak(spans)
        if peak > most:
            yield f"{peak} requests were in flight at the engines at {when}, max_concurrent is {most}"


def _attempts(found: Evidence) -> list[tuple[float, float]]:
    """Return when each attempt began and ended, as the environment and the journal say."""
    ends: dict[tuple[int, int, int], float] = {}
    resumes = [event.time for event in found.events if isinstance(event, Resumed)]
    for event in found.events:
        if isinstance(event, Finished | RolloutDropped):
            ends.setdefault((event.group, event.member, event.attempt), event.time)
    spans: list[tuple[float, float]] = []
    open_at: dict[tuple[Any, ...], float] = {}
    last = 0.0
    for entry in found.environment_log or ():
        name: tuple[Any, ...] = entry["pid"], entry.get("purpose"), entry.get("group"), entry.get("member"), entry.get("attempt")
        last = float(entry["time"])
        if entry["what"] == "reset":
            open_at[name] = last
        elif entry["what"] in {"close", "cancel"} and (began := open_at.pop(name, None)) is not None:
            over = ends.get((name[2], name[3], name[4]), last) if name[1] == "train" else last
            spans.append((began, min(last, max(over, began))))  # a process that stood still notices later than the journal
    for name, began in open_at.items():  # their process was killed: an end stands in the journal, or a resume came, or all ended
        told = ends.get((name[2], name[3], name[4])) if name[1] == "train" else began
        taken_up = next((time for time in resumes if time >= began), last)
        spans.append((began, min(taken_up, told if told is not None and told >= began else taken_up)))
    return spans


def _peak(spans: Sequence[tuple[float, float]]) -> tuple[int, float]:
    """Return how many spans overlap at most, and when; ends come before beginnings of the same moment, and count a little early."""
    moments = sorted([(begin, 1) for begin, _ in spans] + [(max(begin, end - _CLOSED_AFTER_SECONDS), -1) for begin, end in spans])
    now = peak = 0
    when = 0.0
    for time, change in moments:
        now += change
        if now > peak:
            peak, when = now, time
    return peak, when


def unpaused(found: Evidence) -> Iterator[str]:
    """No engine stays paused once an attempt at a weight sync has ended, be it by success or by failure.

    By the engines' logs: when the run has ended, none that could be resumed is paused. An engine that was killed, or that refused or never
    answered the last call to resume it, could not be; then the run may not have ended well.
    """
    for number, log in enumerate(found.engine_logs or ()):
        paused, resumable = _left_paused(log)
        if not paused or found.was_killed:
            continue
        if resumable:
            yield f"engine {number} was left paused"
        elif (found.ended or {}).get("code") == 0 and len(found.engine_logs or ()) == 1:
            yield f"engine {number} could not be resumed, it is the only one, and the run says that it ended well"


def _left_paused(log: Sequence[Entry]) -> tuple[bool, bool]:
    """Return whether an engine is paused at the end of its log, and whether it would have listened to a call to resume."""
    paused, resumable = False, True
    for entry in log:
        if entry["what"] in {"served", "killed"}:
            paused, resumable = False, True
        elif entry["what"] == "answered":
            paused = bool(entry["paused"])
            if entry["path"] in {"/resume", "/continue_generation"}:
                resumable = entry["status"] == 200
        elif entry["what"] == "asked" and entry["path"] in {"/resume", "/continue_generation"}:
            resumable = False  # until it is answered
    return paused, resumable


def ends_well(found: Evidence) -> Iterator[str]:
    """The process ends, with an exit code that says how, a cause that has a name, and never in silence.

    0: a target was reached (all steps, or all prompts, or the reward asked for), and at least one batch was trained; otherwise one of 1, 2,
    3, 130, 143, and a cause in run.json. run.json and the process say the same. Between two facts of the journal there is no silence of
    more than run.stall_seconds, unless events.log tells of the stall.
    """
    ended, code = found.ended, found.exit_code
    if code is not None and code >= 0 and code not in _EXIT_CODES:
        yield f"exit code {code}, which means nothing"
    if ended is not None and not found.was_killed:
        if code is not None and ended.get("code") != code:
            yield f"the process ended with exit code {code}, run.json says {ended.get('code')}"
        if not str(ended.get("cause") or "").strip():
            yield f"run.json names no cause for exit code {ended.get('code')}"
    elif code is not None and code >= 0 and code != 2 and found.info:
        yield f"the process ended with exit code {code}, and run.json tells of no end"
    if (ended or {}).get("code") == 0 and not found.was_killed and found.events and not counted(found.events).trained:
        yield "the run says that it ended well, and no batch was trained"
    yield from _silence(found)


def _silence(found: Evidence) -> Iterator[str]:
    limit = found.setting("run.stall_seconds") or 0
    if not limit:
        return
    log = found.run.events_log
    told = log.exists() and "nothing has moved for " in log.read_text("utf-8", "replace")  # `rules.stall.report`
    for before, after in pairwise(found.events):
        if after.time - before.time > 1.5 * limit + 5 and not isinstance(after, Resumed) and not told:
            yield f"{after.time - before.time:.0f} s without a word after {type(before).__name__}, run.stall_seconds is {limit:g}"
