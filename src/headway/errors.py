"""The exception tree: every way in which a run can end badly has a name here.

Each error says what happened, where, and what to do about it, in one line. `exit_code` is what the process ends with when the
error reaches the command line, `kind` whose matter it is. Whoever turns one error into another raises it `from` the first: the cause
travels. Nothing here knows how errors are shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from headway.secrecy import concealed

Kind = Literal["config", "prompt", "environment", "engine", "trainer", "storage", "run", "bug"]
"""Where to look: the user's config, prompts or environment; an engine, the trainer, the disk; how the run went; headway's own code."""


class HeadwayError(Exception):
    """Base of every error that headway raises on purpose. `detail` (a traceback, the end of a log) is shown below the line.

    Neither holds a secret, whatever it was made from.
    """

    exit_code = 1
    kind: Kind = "run"

    def __init__(self, message: str = "", *, detail: str = "") -> None:
        super().__init__(concealed(message))
        self.detail = concealed(detail)


class ConfigError(HeadwayError):
    """The user's input cannot be run: a key, a value, a file, an import."""

    exit_code = 2
    kind = "config"


class RunFailed(HeadwayError):
    """The run ended without reaching its target, for the cause named in the message."""


class PromptError(RunFailed):
    """The prompt source failed or is empty."""

    kind = "prompt"


class EnvironmentFailed(RunFailed):
    """Rollouts failed too often in a row, or the user's environment could not be started."""

    kind = "environment"


class EngineFailed(RunFailed):
    """An inference engine died, refused a call, or answered nonsense."""

    kind = "engine"


class EngineUnreachable(EngineFailed):
    """Nobody answers at an engine's address: it may not be up yet, or not any more."""


class EngineSilent(EngineFailed):
    """An engine has not answered a call in time: it may be busy, with that call or others, or hang."""


class TrainerFailed(RunFailed):
    """The trainer died or refused a batch."""

    kind = "trainer"


class WorkerFailed(RunFailed):
    """A rollout worker process died."""

    kind = "environment"


class StorageError(RunFailed):
    """The journal, a segment, a batch or a checkpoint could not be written or is damaged."""

    kind = "storage"


class EmptyBatches(RunFailed):
    """Too many batches in a row had nothing that could train."""

    kind = "environment"


class Stalled(RunFailed):
    """Nothing has moved for run.stall_seconds, and `run.on_stall = "exit"`; the message names the stage that is blocked."""

    exit_code = 3


class HeadNeverTrained(RunFailed):
    """A kind of rollout is always too late: in batch after batch none of its first tokens was trained on."""


class BoundBreached(RunFailed):
    """A batch holds a contributing token older than max_staleness. Never a warning: this is the double lock."""

    kind = "bug"


class RolloutTruncated(HeadwayError):
    """A conversation is full. Not a failure: unless the environment handles it, the rollout ends as `truncated` with its good turns."""


def root_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the leaves of a (possibly nested) exception group, in order; a plain exception yields itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from root_causes(inner)
    else:
        yield error


def first_cause(error: BaseException) -> BaseException:
    """Return the leaf that best explains a failure: the first HeadwayError, otherwise the first leaf."""
    leaves = list(root_causes(error))
    return next((leaf for leaf in leaves if isinstance(leaf, HeadwayError)), leaves[0])


def kind_of(error: BaseException) -> Kind:
    """Return whose matter an error is: what headway did not raise on purpose is a bug of its own."""
    cause = first_cause(error)
    return cause.kind if isinstance(cause, HeadwayError) else "bug"
