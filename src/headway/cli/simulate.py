"""`headway simulate`: reads a scenario, plays it, prints what it came to, and saves it where asked.

A run is simulated in `simulated`; what is simulated comes from `_scenario`. Other sources and other ways of simulating join there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.measuring import NO_RUN, FromRun, measured_world
from headway.cli.results import make, tell, write_files
from headway.cli.streams import say
from headway.config.toml import shown
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.sim.scenario import Scenario
    from headway.sim.summary import Interval, Summary

INTERRUPTED_CODE = 130
_PATIENCE_SECONDS = 1.0  # a simulation that ends within needs no progress line
_INTERVAL_SECONDS = 0.2


def simulate_scenario(
    path: Path | None,
    *,
    overrides: Sequence[str],
    out: Path | None,
    as_json: bool,
    from_run: FromRun = NO_RUN,
    sweep: Sequence[str] = (),
    cohorts: bool = False,
    jobs: int = 1,
) -> int:
    """Simulate and print; return the exit code. `sweep`: a grid of scenarios instead of one, `jobs` at once. Raises HeadwayError."""
    from headway.formats.files import strict_json
    from headway.planning.simulate_text import simulate_text

    scenario, name, assumed = _scenario(path, overrides, from_run)
    if sweep:
        from headway.cli.sweep import sweep_scenarios

        return sweep_scenarios(name, scenario, sweep, assumed=assumed, out=out, as_json=as_json, cohorts=cohorts, jobs=jobs)
    if jobs > 1:
        raise ConfigError("--jobs is of a --sweep: one scenario is simulated by one process")
    if out is not None:
        make(out)
    progress = Progress(scenario.run.steps)
    try:
        summary, intervals = simulated(scenario, progress.tell, cohorts=cohorts)
    except KeyboardInterrupt:
        progress.clear()
        with suppress(OSError):
            print(f"headway: interrupted{'' if out is None else ': nothing was saved'}", file=sys.stderr)
        return INTERRUPTED_CODE
    finally:
        progress.clear()
    text = simulate_text(name, scenario, summary, assumed)
    if out is not None:
        _save(out, name, scenario, summary, intervals, text)
    say(strict_json(summary).decode().rstrip() if as_json else text)
    return 0


def scenario_and_grid(words: Sequence[str], sweep: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the scenario's file and the grid. `words`: what stands between the options; after a `--sweep` it may be more of the grid.

    Raises ConfigError for a word that is neither.
    """
    more = [word for word in words if sweep and "=" in word and not Path(word).exists()]
    files = [word for word in words if word not in more]
    if len(files) > 1:
        hint = ": other keys of a grid go behind --sweep" if "=" in files[1] else ", one scenario at a time"
        raise ConfigError(f"simulate: {shown(files[1])} is one argument too many{hint}")
    return (Path(files[0]) if files else None), [*sweep, *more]


def _scenario(path: Path | None, overrides: Sequence[str], from_run: FromRun) -> tuple[Scenario, str, Sequence[str]]:
    """Return what is to be simulated, what it is called, and what a run that it was measured in does not tell of it."""
    from headway.planning.scenario_file import load_scenario

    if path is None and from_run == NO_RUN and not overrides:
        raise ConfigError(
            "simulate: name a scenario: headway simulate SCENARIO.toml (its keys: headway scenario-reference), or a run: --from-run RUN"
        )
    found = measured_world(from_run)
    if found is None:
        return load_scenario(path, overrides), path.stem if path is not None else "scenario", ()
    scenario = load_scenario(path, overrides, found.scenario, called=str(from_run.path))
    return scenario, str(from_run.path) if path is None else path.stem, found.notes


def simulated(scenario: Scenario, told: Callable[[int], None], *, cohorts: bool) -> tuple[Summary, Sequence[Interval]]:
    """Simulate the scenario; return its figures, and who was at what (by `cohorts`: nothing of that). `told`: of trained batches."""
    if cohorts:
        from headway.sim.cohorts import step

        return step(scenario), ()
    from headway.planning.quiet import quietly
    from headway.sim.figures import summarise, timeline
    from headway.sim.play import play

    with quietly():
        played = play(scenario, progress=told)
    return summarise(played), timeline(played)


def _save(directory: Path, name: str, scenario: Scenario, summary: Summary, intervals: Sequence[Interval], text: str) -> None:
    """Write the scenario, the report as text and as a page, figures, timeline and pictures. Raises StorageError."""
    import msgspec

    from headway.formats.files import strict_json
    from headway.planning.page import simulation_page
    from headway.planning.pictures import drawn_or_told, files_of, simulation_pictures
    from headway.planning.scenario_file import scenario_text

    pictures = drawn_or_told(lambda: simulation_pictures(scenario, summary, intervals), tell)
    contents = {
        "scenario.toml": scenario_text(scenario).encode(),
        "report.txt": text.encode() + b"\n",
        "report.html": simulation_page(name, scenario, summary, pictures, text).encode(),
        "summary.json": strict_json(summary),
        **files_of(pictures),
    }
    if intervals:
        contents["timeline.json"] = msgspec.json.encode(intervals).replace(b"},{", b"},\n{") + b"\n"
    write_files(directory, contents)


class Progress:
    """A line on stderr, if that is a terminal, of a simulation that takes a while."""

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._begun = self._told = time.monotonic()
        self._shown = False

    def tell(self, trained: int) -> None:
        """Show how many batches are trained by now, if it is time."""
        from headway.planning.simulate_text import duration

        now = time.monotonic()
        if now - self._begun < _PATIENCE_SECONDS or now - self._told < _INTERVAL_SECONDS or not sys.stderr.isatty():
            return
        self._told, self._shown = now, True
        spent = now - self._begun
        left = f", about {duration(spent * (self._batches / trained - 1))} more" if trained else ""
        self._write(f"\rsimulating: {trained:,} of {self._batches:,} batches{left}\x1b[K")

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            self._shown = False
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
