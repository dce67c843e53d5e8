"""What is asked of a server before any check: is it there, is it an engine of this kind, does it let us in, does it answer at all.

A server that fails here is asked nothing else: every check would fail by the same cause, some of them after minutes.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import NamedTuple

from headway.adapters.engines.credentials import KEY
from headway.adapters.engines.generation import excerpt
from headway.adapters.engines.http import Response
from headway.testing.conformance.bench import Bench
from headway.testing.conformance.verdicts import Failed

_REFUSED = {401, 403}
_NOT_FOUND = 404


class Unusable(NamedTuple):
    """Why a server is asked nothing else. `wrong`: what was seen, for `health`; `why`: for the checks that are skipped."""

    wrong: str
    why: str


async def open_bench(bench: Bench) -> Unusable | None:
    """Ask what every check needs to know; None: go on. What one check is to find out is left to it."""
    limit = bench.settings.answer_seconds
    try:
        async with asyncio.timeout(limit):
            unusable = await _seen(bench)
            if unusable is None:
                with suppress(Failed):
                    await bench.server.find_route()
                    bench.label = await bench.server.label()
    except TimeoutError:
        return Unusable(f"no answer within {limit:g} s", "the server does not answer")
    except Failed as failure:
        return Unusable(str(failure), "the server cannot be reached")
    return unusable


async def _seen(bench: Bench) -> Unusable | None:
    server = bench.server
    if unusable := _judged("/v1/models", await server.call("GET", "/v1/models")):
        return unusable
    paused = None
    with suppress(Failed):
        paused = await server.is_paused()
    if paused:  # before /health, which SGLang would generate a token for
        said = "GET /ready answers 503" if server.is_sglang else "GET /is_paused says so"
        return Unusable(
            f"it is paused ({said}), and whatever it is asked waits: POST {server.resume_path} resumes it", "the server is paused"
        )
    health = await server.call("GET", "/health")
    if health.status == _NOT_FOUND:
        return Unusable(f"GET /health answered {_NOT_FOUND}: a web server, and no inference engine", "the server is no inference engine")
    if unusable := _judged("/health", health):
        return unusable
    other = await server.speaks_other()
    if other is not None:
        own = server.address.kind
        return Unusable(f"it speaks {other}'s protocol, and was asked in {own}'s: write {other}+URL, or --kind {other}", f"it is no {own}")
    return None


def _judged(path: str, response: Response) -> Unusable | None:
    """Tell who is not let in, and who has met a website: no engine redirects, or answers in HTML."""
    said = f"GET {path} answered {response.status}"
    if response.status in _REFUSED:
        return Unusable(f"{said}: it asks for a key: {KEY} is to hold it", "the server asks for a key")
    if 300 <= response.status < 400 or (response.status == 200 and response.body.lstrip()[:1] == b"<"):
        shown = f" ({excerpt(response.body)})" if response.body.strip() else ""
        return Unusable(f"{said}: a website, and no inference engine{shown}", "the server is no inference engine")
    return None
