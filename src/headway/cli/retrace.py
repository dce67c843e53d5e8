"""`headway retrace`: plays a run's journal again through the rules, stops where asked, and shows the state in which the run decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap

from headway.cli.streams import say
from headway.errors import ConfigError
from headway.reports.retrace import RetraceReport, State, Stop, Told

_WIDTH = 100
_LONGEST = 8  # entries of a list that are shown
_APART = {"time", "reference"}


def retrace_run(path: Path, *, events: int | None, batch: int | None, version: int | None, as_json: bool) -> int:
    """Print the report and return the exit code: 1 when journal and rules diverge. Raises HeadwayError."""
    from headway.formats.files import strict_json
    from headway.reports.retrace import retrace_report
    from headway.reports.run_files import open_run

    if sum(asked is not None for asked in (events, batch, version)) > 1:
        raise ConfigError("--until-event, --until-batch and --until-version: give one of them")
    report = retrace_report(open_run(path), Stop(events, batch, version))
    say(strict_json(report).decode().rstrip() if as_json else retrace_text(report))
    return 1 if report.diverged else 0


def retrace_text(report: RetraceReport) -> str:
    """Return the report as plain text, ASCII, at most 100 columns."""
    return "\n".join(line[:_WIDTH].rstrip() for line in _lines(report)).rstrip()


def _lines(report: RetraceReport) -> Iterator[str]:
    state = "ended" if report.ended else "not ended"
    again = f", taken up again {report.resumes} time{'s' if report.resumes > 1 else ''}" if report.resumes else ""
    yield f"run {report.run}, {state}: {report.events:,} events played{again}"
    if report.unjudged:
        yield f"{report.unjudged:,} of them were decided under a config that is not kept: held against what holds under any"
    kinds = sorted(report.kinds.items(), key=lambda entry: -entry[1])
    yield from wrap(", ".join(f"{kind} {count:,}" for kind, count in kinds), _WIDTH, initial_indent="  ", subsequent_indent="  ")
    yield ""
    yield from _state(report.state)
    yield ""
    yield "the last events before it"
    yield from (_event(told) for told in report.before)
    yield ""
    yield "next" if report.next else "the journal ends here"
    if report.next:
        yield _event(report.next)
    yield ""
    yield from _divergences(report)


def _state(state: State) -> Iterator[str]:
    yield f"{'served':15}version {state.version}"
    yield f"{'trained':15}version {state.trained}"
    yield f"{'next batch':15}{state.next_batch}"
    yield f"{'running':15}{_by_birth(state.running)}; {state.rollouts_in_flight} rollouts in flight"
    yield f"{'ready':15}{_by_birth(state.ready)}"
    if state.waiting_prompts:
        yield f"{'to try again':15}{state.waiting_prompts} prompts"
    if state.capacity is not None:
        yield f"{'may start':15}{state.capacity} groups ({state.capacity_reason}), steps_ahead {state.steps_ahead:g}"
        yield f"{'trainer waits':15}for {state.trainer_waits_for}"
    if state.draining:
        yield f"{'draining':15}{state.draining}"


def _by_birth(groups: Mapping[int, int]) -> str:
    total = sum(groups.values())
    if not total:
        return "no groups"
    births = ", ".join(f"{count} of {birth}" for birth, count in groups.items())
    return f"{total} group{'s' if total > 1 else ''}, by birth: {births}"


def _event(told: Told) -> str:
    fields = [f"{name} {_shown(value)}" for name, value in told.fields.items() if name not in _APART and value not in (None, "", ())]
    return f"  {told.number:>8} {told.fields['time']:.3f} {told.event}: {', '.join(fields)}"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, list | tuple) and len(value) > _LONGEST:
        return f"{', '.join(map(_shown, value[:_LONGEST]))}, ... {len(value) - _LONGEST} more"
    return str(value).replace("\n", " ").encode("ascii", "replace").decode()


def _divergences(report: RetraceReport) -> Iterator[str]:
    if not report.diverged:
        yield "no divergence: the rules decide as the journal says"
        return
    yield f"{report.diverged:,} divergence{'s' if report.diverged > 1 else ''} between journal and rules"
    for one in report.divergences:
        yield f"  {one.number:>8} {one.event}: {one.said}"
    if report.diverged > len(report.divergences):
        yield f"  ... {report.diverged - len(report.divergences):,} more"
