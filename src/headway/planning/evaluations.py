"""The load by evaluations, as a config's [eval] says it; how many prompts that is, is in the file that it names.

A prompt source that is a function is not called: a plan runs no code of anybody's. What then is not known is told, by its key.
"""

from __future__ import annotations

from pathlib import Path

from headway.adapters.prompts.rows import read_rows
from headway.errors import ConfigError
from headway.settings import EvalSection
from headway.sim.scenario import EvaluationSection


def evaluations_of(evaluation: EvalSection, known: int | None, notes: list[str]) -> EvaluationSection | None:
    """Return the evaluations of a config whose paths are absolute; None, and a note: nobody knows of how many prompts.

    `known`: prompts that the world has, as measured or as a scenario gives them, where the file does not tell. Notes say what is assumed.
    """
    prompts = _prompts(evaluation, known, notes)
    if prompts is None:
        return None
    return EvaluationSection(
        every=evaluation.every, prompts=prompts, n=evaluation.n, hold_seconds=evaluation.hold_seconds, at_start=evaluation.at_start
    )


def _prompts(evaluation: EvalSection, known: int | None, notes: list[str]) -> int | None:
    limit = evaluation.limit
    count, why = _counted(evaluation.prompts)
    if count:
        return min(count, limit or count)
    if known is not None:
        prompts = min(known, limit or known)
        notes.append(f"eval.prompts: {why}: {prompts}, as in the world that is planned for")
        return prompts
    if limit:
        notes.append(f"eval.prompts: {why}: {limit}, as many as eval.limit allows")
        return limit
    notes.append(f"eval: {why}: how many prompts there are is not known, so there are no evaluations: --set eval.prompts=N says it")
    return None


def _counted(source: str) -> tuple[int, str]:
    """Return how many prompts a source has; 0: why that is not known."""
    if ":" in source:
        return 0, f"{source} is code of yours, which is not called here"
    try:
        count = len(read_rows(Path(source)))
    except (ConfigError, OSError) as error:
        return 0, str(error).removeprefix("prompts: ")
    return count, "" if count else f"{source} is empty"
