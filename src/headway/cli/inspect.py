"""`headway inspect`: reads a run directory, of a run that is over or goes on, and tells what became of its tokens and prompts."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from headway.cli.streams import say
from headway.errors import ConfigError


class What(StrEnum):
    """What a run is asked for."""

    STALENESS = "staleness"
    WASTE = "waste"
    BIAS = "bias"
    QUARANTINE = "quarantine"


def inspect_run(path: Path, what: What, *, as_json: bool, picture: Path | None) -> int:
    """Print the report and return the exit code: 1 when the books of the run do not close. Raises HeadwayError."""
    from headway.cli import inspect_text as text
    from headway.reports.run_files import open_run

    if picture is not None and what is not What.STALENESS:
        raise ConfigError(f"--picture: there is none of {what}, only of staleness")
    run = open_run(path)
    if what is What.STALENESS:
        from headway.reports.staleness import staleness_report

        staleness = staleness_report(run)
        if picture is not None:
            from headway.reports.picture import draw

            draw(staleness, picture)
        say(_json(staleness) if as_json else text.staleness_text(staleness))
        return 0
    if what is What.WASTE:
        from headway.reports.waste import waste_report

        waste = waste_report(run)
        say(_json(waste) if as_json else text.waste_text(waste))
        return 1 if waste.problems else 0
    if what is What.QUARANTINE:
        from headway.reports.quarantine import quarantine_report

        quarantine = quarantine_report(run)
        say(_json(quarantine) if as_json else text.quarantine_text(quarantine))
        return 0
    from headway.reports.bias import bias_report

    bias = bias_report(run)
    say(_json(bias) if as_json else text.bias_text(bias))
    return 0


def _json(report: object) -> str:
    from headway.formats.files import strict_json

    return strict_json(report).decode().rstrip()
