"""`python -m headway.config.probe`: load what a config names, once, in a process that can be thrown away.

Reads a JSON object on standard input: `base` (the config's directory), `entries` and `sources` (config key to value). Writes a JSON list of
problems (`key`, `message`, `detail`) to standard output, which the user's code does not get to write to.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from headway.entries import load_entry
from headway.errors import HeadwayError


def probe(request: dict[str, Any]) -> list[dict[str, str]]:
    """Return the problems of all entries and sources."""
    base = Path(request["base"])
    problems: list[dict[str, str]] = []
    for key, entry in request["entries"].items():
        problems += _tried(key, partial(_check_entry, key, entry, base))
    for key, source in request["sources"].items():
        problems += _tried(key, partial(_check_source, key, source, base))
    return problems


def _tried(key: str, check: Callable[[], None]) -> Iterator[dict[str, str]]:
    try:
        check()
    except HeadwayError as error:
        yield {"key": key, "message": str(error), "detail": error.detail}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything: it is told, not handled
        line = f"{key}: {type(error).__name__}: {error}".splitlines()[0]
        yield {"key": key, "message": line, "detail": "".join(traceback.format_exception(error))}


def _check_entry(key: str, entry: str, base: Path) -> None:
    found = load_entry(entry, base, key=key)
    if not callable(found):
        raise HeadwayError(f'{key} is "{entry}": it is {type(found).__name__}, which cannot be called')
    is_plain = inspect.isfunction(found) and not inspect.iscoroutinefunction(inspect.unwrap(found))
    if is_plain and key == "environment.entry":
        raise HeadwayError(
            f'{key} is "{entry}": a plain function: write `async def attempt(prompt, policy)`, or wrap a reward in headway.single_turn(...)'
        )
    if is_plain and key == "environment.score":
        raise HeadwayError(f'{key} is "{entry}": a plain function: make it `async def`')


async def _check_source(key: str, source: str, base: Path) -> None:
    async for _ in open_source(source, base):
        return
    raise HeadwayError(f'{key} is "{source}": it holds no prompt')


def main() -> None:
    """Answer one request. Standard output is kept for the answer: what user code prints goes to standard error."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    json.dump(probe(json.load(sys.stdin)), answer)
    answer.close()


if __name__ == "__main__":
    main()
