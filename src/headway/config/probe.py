"""`python -m headway.config.probe`: load what a config names, once, in a process that can be thrown away.

Reads a `Request` as JSON on standard input, and writes a JSON list of problems to standard output, which the user's code does not get to
write to.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from headway.adapters.prompts import open_source
from headway.config.problems import Problem
from headway.config.world import Request
from headway.entries import load_entry
from headway.errors import HeadwayError
from headway.lifeline import VARIABLE, guard


def probe(request: Request) -> list[Problem]:
    """Return the problems of all entries and sources."""
    base = Path(request.base)
    checks: list[tuple[str, Callable[[], object]]] = [
        *((key, partial(_check_entry, key, entry, base)) for key, entry in request.entries),
        *((key, partial(open_source, section, base, 0)) for key, section in request.sources.items()),
    ]
    return [problem for key, check in checks for problem in _tried(key, check)]


def _tried(key: str, check: Callable[[], object]) -> Iterator[Problem]:
    try:
        check()
    except HeadwayError as error:
        # Sources of prompts say "prompts", whichever key named them.
        line = str(error).partition("\n")[0].removeprefix(f"{key}: ").removeprefix("prompts: ")
        yield Problem(key, f"{key}: {line}", error.detail)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything: it is told, not handled
        line = f"{key}: {type(error).__name__}: {error}".partition("\n")[0]
        yield Problem(key, line, "".join(traceback.format_exception(error)))


def _check_entry(key: str, entry: str, base: Path) -> None:
    found = load_entry(entry, base, key=key)
    if not callable(found):
        raise HeadwayError(f'"{entry}" is {type(found).__name__}, which cannot be called')
    is_plain = inspect.isfunction(found) and not inspect.iscoroutinefunction(inspect.unwrap(found))
    if key == "metrics.exporters" and inspect.iscoroutinefunction(found):
        raise HeadwayError(f'"{entry}" is `async def`: make it a plain function; it is called in a thread of its own')
    if is_plain and key == "environment.entry":
        raise HeadwayError(
            f'"{entry}" is a plain function: write `async def attempt(prompt, policy)`, or wrap a reward in headway.single_turn(...)'
        )


def main() -> None:
    """Answer one request. Standard output is kept for the answer: what user code prints goes to standard error."""
    guard(grace_seconds=0.0)
    os.environ.pop(VARIABLE, None)  # not the line of what the user's code starts
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        answer.write(msgspec.json.encode(probe(msgspec.json.decode(sys.stdin.buffer.read(), type=Request))))


if __name__ == "__main__":
    main()
