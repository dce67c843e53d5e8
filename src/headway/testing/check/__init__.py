"""The ten standing invariants of FAULT-CASES, checked from outside of a run: by its directory and by the logs of the fakes around it.

Each invariant is a function from the evidence to what shows that it does not hold; its docstring is its definition. They hold of a run at
any moment after its process has ended, also across kills and resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headway.testing.check.accounting import accounting, trained_once
from headway.testing.check.conduct import concurrency, ends_well, unpaused
from headway.testing.check.evidence import Evidence, Violation
from headway.testing.check.remains import nothing_left, strict_json
from headway.testing.check.samples import bound, fidelity, sane_batches
from headway.testing.log import LogSource, read_log, read_logs

INVARIANTS: dict[int, Callable[[Evidence], Iterator[str]]] = {
    1: accounting,
    2: bound,
    3: fidelity,
    4: sane_batches,
    5: trained_once,
    6: concurrency,
    7: unpaused,
    8: ends_well,
    9: nothing_left,
    10: strict_json,
}
SHOWN = 20  # violations of one invariant that are told; a broken run breaks it everywhere

__all__ = ["INVARIANTS", "Violation", "assert_run", "check_run"]


def check_run(
    directory: Path,
    *,
    engine_logs: Sequence[LogSource] | None = None,
    trainer_logs: Sequence[LogSource] | None = None,
    environment_logs: Sequence[LogSource] | None = None,
    exit_code: int | None = None,
) -> list[Violation]:
    """Check a run whose process has ended; returns every violation found, by invariant.

    Logs are files or lists of entries; None: there was no such fake, and what only it can tell is not looked at. Give one log per engine.
    `exit_code`: that of the newest process, -9 where it was killed; None: unknown, and run.json is believed.
    """
    found = Evidence(
        Path(directory),
        engine_logs=None if engine_logs is None else [read_log(log) for log in engine_logs],
        trainer_log=None if trainer_logs is None else read_logs(trainer_logs),
        environment_log=None if environment_logs is None else read_logs(environment_logs),
        exit_code=exit_code,
    )
    violations: list[Violation] = []
    for number, invariant in INVARIANTS.items():
        told = _told(invariant, found)
        violations += [Violation(number, what) for what in told[:SHOWN]]
        if len(told) > SHOWN:
            violations.append(Violation(number, f"and {len(told) - SHOWN} more"))
    return sorted([*found.unreadable, *violations], key=lambda each: each.invariant)


def _told(invariant: Callable[[Evidence], Iterator[str]], found: Evidence) -> list[str]:
    """Return what an invariant tells; evidence so broken that it cannot be judged is told too, and never passes."""
    told: list[str] = []
    try:
        told.extend(invariant(found))
    except Exception as error:  # noqa: BLE001 -- whatever the files made it stumble over
        told.append(f"what the run has left cannot be judged: {type(error).__name__}: {error}")
    return told


def assert_run(
    directory: Path,
    *,
    engine_logs: Sequence[LogSource] | None = None,
    trainer_logs: Sequence[LogSource] | None = None,
    environment_logs: Sequence[LogSource] | None = None,
    exit_code: int | None = None,
) -> None:
    """Raise AssertionError with every violation that `check_run` finds."""
    violations = check_run(
        directory, engine_logs=engine_logs, trainer_logs=trainer_logs, environment_logs=environment_logs, exit_code=exit_code
    )
    if violations:
        raise AssertionError("\n".join([f"{directory}: {len(violations)} violations", *map(str, violations)]))
