"""`headway simulate --sweep`: reads a grid, simulates its points, prints the table, and saves it where asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.results import make, tell, write_files
from headway.cli.simulate import INTERRUPTED_CODE, Progress, simulated
from headway.cli.streams import say

if TYPE_CHECKING:
    from headway.planning.sweep import Outcome, Point, Simulate
    from headway.sim.scenario import Scenario
    from headway.sim.summary import Interval, Summary

FAILED_CODE = 1


def sweep_scenarios(
    name: str,
    base: Scenario,
    texts: Sequence[str],
    *,
    assumed: Sequence[str],
    out: Path | None,
    as_json: bool,
    cohorts: bool,
    jobs: int,
) -> int:
    """Simulate the points of the grid and print what they came to; return the exit code. Interrupted: what is done is kept.

    `assumed`: what a run that the scenario was measured in does not tell of it. `jobs`: points at once. Raises HeadwayError.
    """
    from headway.planning.sweep import parse_sweep, points_of
    from headway.planning.sweep_table import sweep_json, sweep_text
    from headway.sim.cohort_scope import refusal

    def refused(scenario: Scenario) -> str:
        why = refusal(scenario) if cohorts else ""
        return f"the cohort stepper cannot do this: {why}" if why else ""

    points = points_of(base, parse_sweep(texts), refused)
    if out is not None:
        make(out)
    outcomes, interrupted = _outcomes(points, cohorts=cohorts, jobs=jobs)
    if outcomes:
        text = "\n".join([sweep_text(name, outcomes, len(points)), *(f"assumed: {note}" for note in assumed)])
        if out is not None:
            _save(out, name, base, outcomes, len(points), text)
        say(sweep_json(outcomes) if as_json else text)
    if interrupted:
        where = "" if out is None else f": they are in {out}" if outcomes else ": nothing was saved"
        tell(f"interrupted after {len(outcomes):,} of {len(points):,} points{where}")
        return INTERRUPTED_CODE
    return FAILED_CODE if any(each.summary is None and each.point.scenario is not None for each in outcomes) else 0


def _outcomes(points: Sequence[Point], *, cohorts: bool, jobs: int) -> tuple[list[Outcome], bool]:
    """Return what came of the points, and whether somebody did not want to wait for the others."""
    from headway.cli.sweep_apart import simulate_apart
    from headway.planning.draw_timeline import MOST_PANELS
    from headway.planning.sweep import problem_line, run_points

    progress = Progress(sum(point.scenario.run.steps for point in points if point.scenario is not None))
    found: dict[int, Outcome] = {}

    def keep(number: int, outcome: Outcome) -> None:
        found[number] = outcome
        if outcome.problem:
            progress.clear()
            tell(problem_line(outcome.point.name, outcome.problem))

    try:
        if jobs > 1:
            asyncio.run(simulate_apart(points, jobs, cohorts=cohorts, timelines=MOST_PANELS, found=keep, told=progress.tell))
        else:
            for number, outcome in enumerate(run_points(points, _here(progress, cohorts=cohorts))):
                keep(number, outcome)
    except KeyboardInterrupt:
        return [found[number] for number in sorted(found)], True
    finally:
        progress.clear()
    return [found[number] for number in sorted(found)], False


def _here(progress: Progress, *, cohorts: bool) -> Simulate:
    """Return what simulates point after point in this process."""
    from headway.planning.draw_timeline import MOST_PANELS, last_batches

    done = timelines = 0

    def simulate(scenario: Scenario) -> tuple[Summary, Sequence[Interval]]:
        nonlocal done, timelines
        before, done = done, done + scenario.run.steps
        timelines += 1
        summary, intervals = simulated(scenario, lambda trained: progress.tell(before + trained), cohorts=cohorts)
        progress.tell(done)
        return summary, last_batches(intervals) if timelines <= MOST_PANELS else ()

    return simulate


def _save(directory: Path, name: str, base: Scenario, outcomes: Sequence[Outcome], points: int, text: str) -> None:
    """Write the table, the scenario that its points vary, a page and pictures. Raises StorageError."""
    from headway.planning.page import sweep_page
    from headway.planning.pictures import drawn_or_told, files_of, sweep_pictures
    from headway.planning.scenario_file import scenario_text
    from headway.planning.sweep_table import sweep_csv, sweep_parquet

    pictures = drawn_or_told(lambda: sweep_pictures(outcomes), tell)
    contents = {
        "scenario.toml": scenario_text(base).encode(),
        "report.txt": text.encode() + b"\n",
        "sweep.csv": sweep_csv(outcomes),
        "sweep.parquet": sweep_parquet(outcomes),
        "sweep.html": sweep_page(name, base, outcomes, pictures, points).encode(),
        **files_of(pictures),
    }
    write_files(directory, contents)
