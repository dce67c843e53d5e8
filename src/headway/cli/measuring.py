"""`--from-run`, `--from-batch` and `--until-batch` of `headway plan` and `headway simulate`: the world as a run has measured it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.planning.measured import Measured


class FromRun(NamedTuple):
    """What is to be measured: a run's directory (None: nothing is), from the batch `first` on and before the batch `end`, if given."""

    path: Path | None = None
    first: int | None = None
    end: int | None = None


NO_RUN = FromRun()


def measured_world(asked: FromRun) -> Measured | None:
    """Return what a run tells of its world; None: no run is named. Raises HeadwayError."""
    if asked.path is None:
        for option, batch in (("--from-batch", asked.first), ("--until-batch", asked.end)):
            if batch is not None:
                raise ConfigError(f"{option} is about the run that is measured: name it by --from-run RUN")
        return None
    from headway.planning.measured import between, measured
    from headway.reports.run_files import open_run

    run = open_run(asked.path)
    since, until = between(run, asked.first, asked.end)
    return measured(run, since=since, until=until)
