"""The command line: parses, calls, and turns every ending into an exit code.

0 done · 1 failed, the cause on the last line · 2 the input cannot be run · 3 stalled · 130 / 143 interrupted (SIGINT / SIGTERM). Errors
that headway raises on purpose are one line on stderr, whose matter they are in brackets (details below, where there are some), never a
traceback. What a command needs is imported by the command, so that `headway --help` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

_LEAVE_SECONDS = 5.0  # for threads of somebody's that do not end: everything is written by then
_INTERRUPTED_CODE = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (`arguments` unset: those of the process) and exit."""
    from headway.cli.streams import leave_nothing_unwritten, leave_within, open_missing

    open_missing()
    code = 1
    try:
        code = command_line(sys.argv[1:] if arguments is None else arguments)
        sys.exit(code)
    except KeyboardInterrupt:  # Ctrl-C while the command was still being imported: nothing has begun
        code = _INTERRUPTED_CODE
        sys.exit(code)
    finally:
        leave_within(_LEAVE_SECONDS, code)  # first: what is unwritten may be waiting for a terminal that stands still
        leave_nothing_unwritten()


_KINDS_UNTOLD = {"config", "run"}  # the line says it all


def command_line(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. An error that nobody raised on purpose is a bug: its traceback is shown, and a request."""
    from headway.cli.commands import app
    from headway.errors import HeadwayError, first_cause

    try:
        app(list(arguments), prog_name="headway")
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except Exception as error:  # noqa: BLE001  whatever it is, it has an exit code and is shown
        cause = first_cause(error)
        if not isinstance(cause, HeadwayError):
            return _bug(error, cause)
        line = f"headway: {cause}{'' if cause.kind in _KINDS_UNTOLD else f' [{cause.kind}]'}"
        _complain(f"{line}\n{cause.detail}" if cause.detail else line)
        return cause.exit_code
    return 0


def _bug(error: Exception, cause: BaseException) -> int:
    import traceback

    line = " ".join(f"{type(cause).__name__}: {cause}".split())
    request = "headway has a bug, please report it with the lines above (a run's events.log has them too)"
    _complain(f"{''.join(traceback.format_exception(error))}{request}: {line} [bug]")
    return 1


def _complain(text: str) -> None:
    """Print what ended a command. Where nobody reads, or nobody goes on reading, the exit code still tells."""
    from headway.launch.fuse import within

    within(_LEAVE_SECONDS, lambda: print(text, file=sys.stderr, flush=True))
